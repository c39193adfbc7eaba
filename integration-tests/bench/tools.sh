#!/bin/sh
# Runs benchmark tools, as they come from PyPI, against a running server, and saves what they say.
# Usage: tools.sh http://HOST:PORT MODEL TOKENIZER_FOLDER [RESULTS_FOLDER]
# $TOOLS names them, by default "guidellm aiperf"; vllm and sglang bring 10 GB of engine along each.
# The venvs are made in $VENVS, by default below the build folder.
set -eu
url=${1:?the address of a running server}
model=${2:?the name of the served model}
tokenizer=${3:?a folder with the tokenizer.json of the model}
results=${4:-bench-results}
tools=${TOOLS:-guidellm aiperf}
venvs=${VENVS:-${CARGO_TARGET_DIR:-target}/bench-python}
mkdir -p "$results" "$venvs"

# Each asks for 32 answers of 32 tokens to prompts of 128, over both of OpenAI's routes where it can.
run_guidellm() {
    "$venvs/guidellm/bin/guidellm" run \
        --backend "kind=openai_http,target=$url" \
        --profile kind=concurrent,streams=4 \
        --constraint kind=max_requests,count=32 \
        --tokenizer "kind=huggingface_auto,model=$tokenizer" \
        --data kind=synthetic_text,prompt_tokens=128,output_tokens=32 \
        --output "kind=json,path=$results/guidellm.json" \
        --disable-console-interactive
}

run_aiperf() {
    for kind in chat completions; do
        "$venvs/aiperf/bin/aiperf" profile \
            --model "$model" --url "$url" --tokenizer "$tokenizer" \
            --endpoint-type "$kind" --streaming \
            --concurrency 4 --request-count 32 --isl 128 --osl 32 \
            --artifact-dir "$results/aiperf-$kind" --ui none
    done
}

run_vllm() {
    for kind in openai-chat:/v1/chat/completions openai:/v1/completions; do
        "$venvs/vllm/bin/vllm" bench serve \
            --model "$model" --base-url "$url" --tokenizer "$tokenizer" \
            --backend "${kind%%:*}" --endpoint "${kind#*:}" \
            --dataset-name random --num-prompts 32 --random-input-len 128 --random-output-len 32 \
            --save-result --result-dir "$results" --result-filename "vllm-${kind%%:*}.json"
    done
}

run_sglang() {
    for kind in sglang-oai-chat sglang-oai; do
        "$venvs/sglang/bin/python" -m sglang.bench_serving \
            --model "$model" --base-url "$url" --tokenizer "$tokenizer" --backend "$kind" \
            --dataset-name random-ids --num-prompts 32 --random-input-len 128 --random-output-len 32 \
            --random-range-ratio 1.0 --output-file "$results/$kind.jsonl"
    done
}

for tool in $tools; do
    if [ ! -x "$venvs/$tool/bin/python" ]; then
        python3 -m venv "$venvs/$tool"
        "$venvs/$tool/bin/pip" install --quiet --disable-pip-version-check "$tool"
    fi
    "run_$tool"
done
