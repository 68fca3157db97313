#!/usr/bin/env bash
# Makes the virtual environments of the peers that `./dev bench traces` compares with, one each: they want
# versions of transformers of their own. About a minute where uv has torch in its cache.

set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source tools/setup.sh

readonly WHERE=${VLSCOPE_BENCH_CACHE:-benchmarks/.cache}/peers
readonly TORCH=(torch==2.11.0 torchvision==0.26.0)

make_peer() {
  local folder=$WHERE/$1
  [[ -e $folder/.done ]] && return
  say "installing $1 into $folder"
  uv venv --quiet --clear --python .venv/bin/python "$folder"
  quietly uv pip install --quiet --python "$folder/bin/python" "${TORCH[@]}" "${@:2}" || fail "could not install $1 (above)"
  touch "$folder/.done"
}

make_peer nnsight nnsight==0.8.1 transformers==5.17.0
make_peer transformer-lens transformer-lens==4.3.0 transformers==5.24.0
