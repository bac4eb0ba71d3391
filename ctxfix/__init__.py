# SPDX-License-Identifier: Apache-2.0
"""Every thread that touches a GPU transfer runs in the CUDA context of the memory it touches."""

__version__ = "0.1.0"
