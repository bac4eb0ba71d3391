# SPDX-License-Identifier: Apache-2.0
"""What was seen of transfers, one source a file, each with what it cannot tell.

posts: what applications hand to NIXL, and in which context · fabric_calls: libfabric's own CUDA calls · cupti: the
copies that the GPU reports · fabric_log: what libfabric, NIXL and UCX say · contexts: which GPUs hold a context of this
process · efa: the network devices' counters · identity: which rank of which job a process is.

recorder writes them as JSON lines, one file a process (records); merge reads the files of a run back.
"""
