#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SGLang with prefill and decode on one EFA host: starts both and a router, sends one long request, says what the log
# tells, and stops them. Four GPUs, one EFA device, SGLang 0.5.12.post1 and a NIXL; one row a run:
#
#   CTXFIX_DISABLE=1 ./launch.sh                                  as shipped
#   CTXFIX_DISABLE=1 FI_EFA_ENABLE_SHM_TRANSFER=0 ./launch.sh     libfabric's shm off: through the EFA device
#   CTXFIX_RECORD=$PWD/records ./launch.sh                        with ctxfix (pip install ctxfix); evidence in records/
#
# OUT names the folder of the logs, MODEL_PATH the model, PYTHON an interpreter that has SGLang, NIXL and the router.
set -euo pipefail
: "${MODEL_PATH:=deepseek-ai/DeepSeek-V2-Lite-Chat}" "${PYTHON:=python3}" "${OUT:=.}"
export SGLANG_DISAGGREGATION_NIXL_BACKEND=LIBFABRIC FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1 FI_LOG_LEVEL=info
unset FI_LOG_PROV # "efa" would hide the line on SAR, which is shm's
mkdir -p "$OUT"

common=(--model-path "$MODEL_PATH" --revision 85864749cd611b4353ce1decdb286193298f64c7 --host 127.0.0.1 --tp-size 2
    --dtype bfloat16 --kv-cache-dtype bf16 --context-length 32768 --chunked-prefill-size 8192
    --mem-fraction-static 0.75 --page-size 1 --enable-metrics --stream-interval 1
    --disaggregation-transfer-backend nixl)

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
CUDA_VISIBLE_DEVICES=0,1 "$PYTHON" -m sglang.launch_server "${common[@]}" --port 30000 \
    --disaggregation-mode prefill --disaggregation-bootstrap-port 8998 >"$OUT/prefill.log" 2>&1 &
CUDA_VISIBLE_DEVICES=2,3 "$PYTHON" -m sglang.launch_server "${common[@]}" --port 30001 \
    --disaggregation-mode decode >"$OUT/decode.log" 2>&1 &

# Until a URL answers; ends with the log if a server dies or takes longer than 20 minutes.
answers() {
    for _ in $(seq 600); do
        curl -sf "$1" >/dev/null && return
        [ "$(jobs -pr | wc -l)" -ge "$2" ] || break
        sleep 2
    done
    echo "no answer from $1; see $OUT/*.log" >&2
    tail -n 20 "$OUT"/*.log >&2
    exit 1
}
answers http://127.0.0.1:30000/health 2
answers http://127.0.0.1:30001/health 2

"$PYTHON" -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30000 8998 \
    --decode http://127.0.0.1:30001 --host 127.0.0.1 --port 8000 --policy round_robin --disable-retries \
    --request-timeout-secs 330 >"$OUT/router.log" 2>&1 &
answers http://127.0.0.1:8000/health 3

"$PYTHON" - <<'PROGRAM'
import json, random, urllib.request

body = {"input_ids": [random.randrange(1000, 30000) for _ in range(8192)],
        "sampling_params": {"max_new_tokens": 256, "ignore_eos": True}}
request = urllib.request.Request("http://127.0.0.1:8000/generate", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
answer = json.loads(urllib.request.urlopen(request, timeout=600).read())
print("tokens generated:", answer["meta_info"]["completion_tokens"])
PROGRAM

# What SGLang itself measured, and libfabric's two lines. No SAR line proves nothing: `ctxfix report` does.
curl -sf http://127.0.0.1:30000/metrics |
    grep -E '^sglang:per_stage_req_latency_seconds_(sum|count).*prefill_transfer_kv_cache' || true
for line in "fallback to using SAR" "Failed to perform cuMemGetAddressRange"; do
    echo "$line: $(grep -c "$line" "$OUT/prefill.log" || true) lines in prefill.log"
done
