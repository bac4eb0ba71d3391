# SPDX-License-Identifier: Apache-2.0
"""The errors ctxfix raises: to callers of its own API, and into the application only in strict mode."""


class CtxfixError(Exception):
    """Base of every error of ctxfix."""


class DriverError(CtxfixError):
    """A CUDA driver call failed.

    ``code`` is its CUresult: 201 INVALID_CONTEXT, 500 NOT_FOUND, 709 CONTEXT_IS_DESTROYED, …
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class UnknownOwnerError(CtxfixError):
    """No CUDA context could be found for the memory or the thread in question."""


class PatchError(CtxfixError):
    """A host's class or method is not where it was expected, or somebody wrapped it after us."""


class EvidenceError(CtxfixError):
    """Records cannot be written or read."""


class VerifyError(CtxfixError):
    """The verification could not be run; the message says why."""
