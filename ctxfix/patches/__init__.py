# SPDX-License-Identifier: Apache-2.0
"""The hosts whose transfer threads ctxfix binds: one module a host, each with apply(), remove() and status()."""
