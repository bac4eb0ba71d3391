# SPDX-License-Identifier: Apache-2.0
"""Proof of the path a transfer took, rank by rank: workload and ranks, verdicts, report."""
