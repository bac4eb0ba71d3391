# SPDX-License-Identifier: Apache-2.0
"""Makes every interpreter what a rank of a server is: CUDA in use on GPU 1, NIXL imported, and so ctxfix's hooks on."""

import ctypes

_cuda = ctypes.CDLL("libcuda.so.1")
_context = ctypes.c_void_p()
if _cuda.cuInit(0) or _cuda.cuDevicePrimaryCtxRetain(ctypes.byref(_context), 1):
    raise RuntimeError("the rig's CUDA driver does not work")

import nixl_cu12._api  # noqa: E402, F401
