/* SPDX-License-Identifier: Apache-2.0 */
/* The Python face of the extension; ctxfix/native/__init__.py says what each function means. */
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h> /* says Py_GIL_DISABLED; a free-threaded Python before 3.15 has no stable ABI */
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include "native.h"

#if CX_SUPPORTED
#include <pthread.h>
#include <string.h>

static PyObject *scan(PyObject *self, PyObject *args)
{
	(void)self, (void)args;
	atomic_store(&cx_off, false);
	Py_BEGIN_ALLOW_THREADS /* a constructor of a library being loaded may wait for the GIL */
	cx_scan();
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

static PyObject *undo(PyObject *self, PyObject *args)
{
	(void)self, (void)args;
	Py_BEGIN_ALLOW_THREADS
	cx_undo();
	Py_END_ALLOW_THREADS
	atomic_store(&cx_off, true);
	return Py_BuildValue("(kk)", atomic_load(&cx_slot_counts.restored), atomic_load(&cx_slot_counts.left));
}

static PyObject *set_late(PyObject *self, PyObject *args)
{
	PyObject *words;
	const char *list[16];
	(void)self;
	if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &words))
		return NULL;
	Py_ssize_t n = PyTuple_Size(words);
	if (n > 16)
		return PyErr_SetString(PyExc_ValueError, "at most 16 words"), NULL;
	for (Py_ssize_t i = 0; i < n; i++)
		if (!(list[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(words, i), NULL)))
			return NULL;
	if (cx_set_late(list, (size_t)n))
		return PyErr_NoMemory();
	Py_RETURN_NONE;
}

static PyObject *arm(PyObject *self, PyObject *args)
{
	int on;
	unsigned long long context;
	unsigned group;
	(void)self;
	if (!PyArg_ParseTuple(args, "pKI", &on, &context, &group))
		return NULL;
	struct cx_armed now = { on != 0, (void *)(uintptr_t)context, group };
	struct cx_armed before = cx_arm(now);
	if (on) {
		atomic_store(&cx_off, false);
		Py_BEGIN_ALLOW_THREADS
		cx_driver();
		cx_scan();
		Py_END_ALLOW_THREADS
	}
	return Py_BuildValue("(OKI)", before.on ? Py_True : Py_False, (unsigned long long)(uintptr_t)before.context,
			     before.group);
}

static PyObject *present(PyObject *self, PyObject *args)
{
	struct cx_armed now = cx_armed_now();
	(void)self, (void)args;
	return Py_BuildValue("(OKI)", now.on ? Py_True : Py_False, (unsigned long long)(uintptr_t)now.context, now.group);
}

static PyObject *new_group(PyObject *self, PyObject *args)
{
	(void)self, (void)args;
	unsigned number = cx_new_group();
	return number ? PyLong_FromUnsignedLong(number) : PyErr_NoMemory();
}

static PyObject *bind_group(PyObject *self, PyObject *args)
{
	unsigned group;
	unsigned long long context;
	(void)self;
	if (!PyArg_ParseTuple(args, "IK", &group, &context))
		return NULL;
	if (cx_bind_group(group, (void *)(uintptr_t)context))
		return PyErr_Format(PyExc_ValueError, "no thread group %u", group);
	Py_RETURN_NONE;
}

static PyObject *group_info(PyObject *self, PyObject *args)
{
	unsigned group;
	void *context;
	unsigned long threads, bound, failed;
	(void)self;
	if (!PyArg_ParseTuple(args, "I", &group))
		return NULL;
	if (cx_group_info(group, &context, &threads, &bound, &failed))
		return PyErr_Format(PyExc_ValueError, "no thread group %u", group);
	return Py_BuildValue("(Kkkk)", (unsigned long long)(uintptr_t)context, threads, bound, failed);
}

static PyObject *set_home(PyObject *self, PyObject *args)
{
	unsigned long long context;
	(void)self;
	if (!PyArg_ParseTuple(args, "K", &context))
		return NULL;
	cx_set_home((void *)(uintptr_t)context);
	Py_RETURN_NONE;
}

static PyObject *log_import(PyObject *self, PyObject *args)
{
	const char *path;
	(void)self;
	return PyArg_ParseTuple(args, "s", &path) ? PyLong_FromLong(cx_log_import(path)) : NULL;
}

/* {kind: (count, [line, …])} */
static PyObject *log_said(PyObject *self, PyObject *args)
{
	struct cx_log_kind said;
	PyObject *all = PyDict_New();
	(void)self, (void)args;
	for (int k = 0; all && k < CX_LOG_KINDS; k++) {
		cx_log_read(k, &said);
		PyObject *lines = PyList_New(0);
		for (unsigned long i = 0; lines && i < said.count && i < CX_LOG_LINES; i++) {
			PyObject *line = PyUnicode_DecodeUTF8(said.lines[i], (Py_ssize_t)strlen(said.lines[i]), "replace");
			if (!line || PyList_Append(lines, line))
				Py_CLEAR(lines);
			Py_XDECREF(line);
		}
		PyObject *entry = lines ? Py_BuildValue("(kN)", said.count, lines) : NULL;
		if (!entry || PyDict_SetItemString(all, cx_log_name(k), entry))
			Py_CLEAR(all);
		Py_XDECREF(entry);
	}
	return all;
}

static PyObject *observe(PyObject *self, PyObject *on)
{
	(void)self;
	return PyBool_FromLong(atomic_exchange(&cx_observe, on == Py_True));
}

static PyObject *hold(PyObject *self, PyObject *on)
{
	(void)self;
	return PyBool_FromLong(cx_hold(on == Py_True));
}

static PyObject *copy_mode(PyObject *self, PyObject *args)
{
	int mode;
	(void)self;
	if (!PyArg_ParseTuple(args, "i", &mode))
		return NULL;
	if (mode < 0 || mode > 2)
		return PyErr_Format(PyExc_ValueError, "no copy mode %d", mode);
	return PyLong_FromLong(atomic_exchange(&cx_copy_mode, mode));
}

static PyObject *fault(PyObject *self, PyObject *args)
{
	const char *name;
	int value;
	(void)self;
	if (!PyArg_ParseTuple(args, "si", &name, &value))
		return NULL;
	if (!strcmp(name, "mprotect"))
		atomic_store(&cx_fault_mprotect, value);
	else if (!strcmp(name, "malloc"))
		atomic_store(&cx_fault_malloc, value);
	else
		return PyErr_Format(PyExc_ValueError, "no fault %s", name);
	Py_RETURN_NONE;
}

/* Add to a dict and drop our reference; false on error. */
static bool put(PyObject *dict, const char *key, PyObject *value)
{
	int r = value ? PyDict_SetItemString(dict, key, value) : -1;
	Py_XDECREF(value);
	return r == 0;
}

static bool put_count(PyObject *dict, const char *key, cx_count *count)
{
	return put(dict, key, PyLong_FromUnsignedLong(atomic_load(count)));
}

static PyObject *calls_of(int device)
{
	PyObject *kinds = PyDict_New();
	for (int k = 0; kinds && k < CX_KINDS; k++) {
		struct cx_call_counts *c = &cx_calls[device][k];
		if (!atomic_load(&c->calls))
			continue;
		PyObject *row = PyDict_New();
		if (!row || !put_count(row, "calls", &c->calls) || !put_count(row, "failures", &c->failures) ||
		    !put_count(row, "bytes", &c->bytes) || !put_count(row, "rebinds", &c->rebinds)) {
			Py_XDECREF(row);
			Py_CLEAR(kinds);
			break;
		}
		if (!put(kinds, cx_kind_names[k], row))
			Py_CLEAR(kinds);
	}
	return kinds;
}

static PyObject *counters(PyObject *self, PyObject *args)
{
	(void)self, (void)args;
	PyObject *all = PyDict_New(), *threads = PyDict_New(), *slots = PyDict_New(), *fabric = PyDict_New(),
		 *calls = PyDict_New();
	bool ok = all && threads && slots && fabric && calls;
	struct cx_thread_counts *t = &cx_thread_counts;
	struct cx_slot_counts *s = &cx_slot_counts;
	struct cx_fabric_counts *f = &cx_fabric_counts;
	ok = ok && put_count(threads, "created", &t->created) && put_count(threads, "bound", &t->bound) &&
	     put_count(threads, "pending", &t->pending) && put_count(threads, "late", &t->late) &&
	     put_count(threads, "failed", &t->failed) && put_count(threads, "plain", &t->plain) &&
	     put_count(threads, "held", &t->held);
	ok = ok && put_count(slots, "scans", &s->scans) && put_count(slots, "objects", &s->objects) &&
	     put_count(slots, "patched", &s->patched) && put_count(slots, "foreign", &s->foreign) &&
	     put_count(slots, "write_failures", &s->write_failures) &&
	     put_count(slots, "protect_failures", &s->protect_failures) && put_count(slots, "restored", &s->restored) &&
	     put_count(slots, "left", &s->left) && put(slots, "errno", PyLong_FromLong(atomic_load(&s->last_errno)));
	ok = ok && put_count(fabric, "answered", &f->answered) && put_count(fabric, "adopted", &f->adopted) &&
	     put_count(fabric, "conflicts", &f->conflicts) && put_count(fabric, "unknown_async", &f->unknown_async) &&
	     put_count(fabric, "translated", &f->translated) && put_count(fabric, "untranslated", &f->untranslated) &&
	     put_count(fabric, "own_stream", &f->own_stream) && put_count(fabric, "off_stream", &f->off_stream);
	for (int d = 0; ok && d <= CX_MAX_DEVICES; d++) {
		PyObject *kinds = calls_of(d);
		PyObject *key = PyLong_FromLong(d == CX_MAX_DEVICES ? -1 : d);
		ok = kinds && key && (PyDict_Size(kinds) == 0 || PyDict_SetItem(calls, key, kinds) == 0);
		Py_XDECREF(kinds);
		Py_XDECREF(key);
	}
	Py_XINCREF(threads), Py_XINCREF(slots), Py_XINCREF(fabric), Py_XINCREF(calls);
	ok = ok && put(all, "threads", threads) && put(all, "slots", slots) && put(all, "fabric", fabric) &&
	     put(all, "calls", calls);
	Py_XDECREF(threads), Py_XDECREF(slots), Py_XDECREF(fabric), Py_XDECREF(calls);
	if (!ok)
		Py_CLEAR(all);
	return all;
}

static void after_fork(void)
{
	atomic_store(&cx_off, true);
	cx_driver_forked();
	cx_threads_forked();
	cx_fabric_forked();
	cx_log_forked();
	cx_unlock();
}

static PyMethodDef methods[] = {
	{ "scan", scan, METH_NOARGS, NULL },
	{ "undo", undo, METH_NOARGS, NULL },
	{ "set_late", set_late, METH_VARARGS, NULL },
	{ "arm", arm, METH_VARARGS, NULL },
	{ "present", present, METH_NOARGS, NULL },
	{ "new_group", new_group, METH_NOARGS, NULL },
	{ "bind_group", bind_group, METH_VARARGS, NULL },
	{ "group_info", group_info, METH_VARARGS, NULL },
	{ "set_home", set_home, METH_VARARGS, NULL },
	{ "hold", hold, METH_O, NULL },
	{ "log_import", log_import, METH_VARARGS, NULL },
	{ "log_said", log_said, METH_NOARGS, NULL },
	{ "observe", observe, METH_O, NULL },
	{ "copy_mode", copy_mode, METH_VARARGS, NULL },
	{ "fault", fault, METH_VARARGS, NULL },
	{ "counters", counters, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};
#else
static PyMethodDef methods[] = { { NULL, NULL, 0, NULL } };
#endif

static struct PyModuleDef module = { PyModuleDef_HEAD_INIT, "ctxfix.native._native", NULL, -1, methods, NULL, NULL, NULL, NULL };

PyMODINIT_FUNC PyInit__native(void)
{
	PyObject *m = PyModule_Create(&module);
	if (!m || PyModule_AddIntConstant(m, "SUPPORTED", CX_SUPPORTED)) {
		Py_XDECREF(m);
		return NULL;
	}
#ifdef Py_GIL_DISABLED
	PyUnstable_Module_SetGIL(m, Py_MOD_GIL_NOT_USED);
#endif
#if CX_SUPPORTED
	static bool once;
	if (!once) {
		once = true;
		cx_threads_init();
		cx_fabric_init();
		pthread_atfork(cx_lock, cx_unlock, after_fork);
	}
#endif
	return m;
}
