# SPDX-License-Identifier: Apache-2.0
"""The names NIXL 1.1.0 mentions when it is imported, for interpreters without torch."""


class Tensor: ...


class device: ...


float32 = None
