/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for engines that bring native workers (NVSHMEM's proxies, NCCL with aws-ofi-nccl, DeepEP): one worker an
 * engine, which starts a helper of its own as it begins, and asks the driver about memory that it is given.
 */
#include <pthread.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))

int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address);
int cuCtxGetDevice(int *device);

struct answer {
    int error, device; /* cuMemGetAddressRange for the memory; the device of the thread's context, -1: none */
};
struct engine {
    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned long long address; /* of the job; 0: none */
    int stop, done;
    struct answer of_worker, of_helper;
};

static struct answer ask(unsigned long long address)
{
    unsigned long long base = 0;
    size_t size = 0;
    struct answer answer = { cuMemGetAddressRange_v2(&base, &size, address), -1 };
    if (cuCtxGetDevice(&answer.device))
        answer.device = -1;
    return answer;
}

static void *help(void *argument)
{
    struct engine *engine = argument;
    engine->of_helper = ask(engine->address);
    return NULL;
}

static void *work(void *argument)
{
    struct engine *engine = argument;
    pthread_mutex_lock(&engine->lock);
    while (!engine->address && !engine->stop)
        pthread_cond_wait(&engine->changed, &engine->lock);
    if (!engine->stop) {
        pthread_t helper;
        engine->of_worker = ask(engine->address);
        if (!pthread_create(&helper, NULL, help, engine))
            pthread_join(helper, NULL);
        engine->done = 1;
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

API void *engine_new(void)
{
    struct engine *engine = calloc(1, sizeof(*engine));
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->changed, NULL);
    pthread_create(&engine->worker, NULL, work, engine);
    return engine;
}

/* Have the worker look at memory, once; answers: worker's error and device, helper's error and device. */
API void engine_look(void *handle, unsigned long long address, int answers[4])
{
    struct engine *engine = handle;
    pthread_mutex_lock(&engine->lock);
    engine->address = address;
    pthread_cond_broadcast(&engine->changed);
    while (!engine->done)
        pthread_cond_wait(&engine->changed, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(engine->worker, NULL);
    answers[0] = engine->of_worker.error, answers[1] = engine->of_worker.device;
    answers[2] = engine->of_helper.error, answers[3] = engine->of_helper.device;
    free(engine);
}
