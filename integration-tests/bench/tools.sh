#!/bin/sh
# Runs guidellm and aiperf, as they come from PyPI, against a running server, and saves what they
# say. Usage: tools.sh http://HOST:PORT MODEL TOKENIZER_FOLDER [RESULTS_FOLDER]
# The venvs are made in $VENVS, by default below the build folder.
set -eu
url=${1:?the address of a running server}
model=${2:?the name of the served model}
tokenizer=${3:?a folder with the tokenizer.json of the model}
results=${4:-bench-results}
venvs=${VENVS:-${CARGO_TARGET_DIR:-target}/bench-python}
mkdir -p "$results" "$venvs"

for tool in guidellm aiperf; do
    if [ ! -x "$venvs/$tool/bin/$tool" ]; then
        python3 -m venv "$venvs/$tool"
        "$venvs/$tool/bin/pip" install --quiet --disable-pip-version-check "$tool"
    fi
done

"$venvs/guidellm/bin/guidellm" run \
    --backend "kind=openai_http,target=$url" \
    --profile kind=concurrent,streams=4 \
    --constraint kind=max_requests,count=32 \
    --tokenizer "kind=huggingface_auto,model=$tokenizer" \
    --data kind=synthetic_text,prompt_tokens=128,output_tokens=32 \
    --output "kind=json,path=$results/guidellm.json" \
    --disable-console-interactive

for kind in chat completions; do
    "$venvs/aiperf/bin/aiperf" profile \
        --model "$model" --url "$url" --tokenizer "$tokenizer" \
        --endpoint-type "$kind" --streaming \
        --concurrency 4 --request-count 32 --isl 128 --osl 32 \
        --artifact-dir "$results/aiperf-$kind" --ui none
done
