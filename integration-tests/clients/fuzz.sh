#!/bin/sh
# Fuzzes a running server by its own OpenAPI document: no answer may be a server error, and every
# answer must be as documented. Usage: fuzz.sh http://HOST:PORT [SECONDS] [REQUESTS/s]
# Makes a venv with schemathesis (PyPI) in $VENV, by default below the build folder.
set -eu
url=${1:?the address of a running server}
seconds=${2:-1200}
rate=${3:-50}
venv=${VENV:-${CARGO_TARGET_DIR:-target}/fuzz-python}
if [ ! -x "$venv/bin/schemathesis" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check schemathesis
fi
# What the server may refuse, a schema cannot say in full: whether 4xx was right is not asked.
exec nice "$venv/bin/schemathesis" run "$url/openapi.json" \
    --max-time "$seconds" --rate-limit "$rate/s" --request-timeout 120 --continue-on-failure \
    --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method
