# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the package cupti-python, for the rig's fake GPUs; see cupti.py."""
