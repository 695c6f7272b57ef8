#!/usr/bin/env bash
# Builds, tests and benchmarks everything that needs a GPU, in one command. `scripts/gpu_check.sh --help` says more.
set -uo pipefail
cd "$(dirname "$0")/.."

ROOT=$PWD
JOBS=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
LOG=$ROOT/build/gpu_check.log
EXIT_NO_GPU=3
LEFT_OUT=77  # what a stage returns that lacks something to run with

usage() {
  cat <<'END'
Build, test and benchmark everything that needs a GPU.

  scripts/gpu_check.sh [--quick] [--out FOLDER] [--only STAGE]...

  --only STAGE   one of build, check, cpp, tests, adam, short, large (in this order), several where it is repeated: a
                 later stage alone uses what an earlier run has built
  --quick        everything tiny in the benchmarks: do they run? No figures.
  --out FOLDER   where gpu_<name>_<date>.json (Adam), gpu_<name>_<date>_runtime.json and ..._large.json (models of the
                 size of all memory and of the disk here, and other libraries) go (default: benchmarks/results)

environment:
  PYTHON                     the interpreter to start from (default python3)
  GEMINI_CHECK_VENV=system   use that interpreter and its packages as they are instead of making .venv: for machines
                             without a network. It must have a torch that sees the GPU, pybind11, setuptools, pytest,
                             hypothesis, psutil, numpy, scipy, safetensors, rich, and find cmake and ninja on PATH.
  CUDAARCHS                  the GPUs to build for, as CMake writes them (default: native, the ones in this machine)

exit codes: 0 all passed; 1 something failed or was left out, see the summary and build/gpu_check.log;
            2 wrong usage; 3 no GPU here
END
}

say() { printf '[gpu_check] %s\n' "$*" >&2; }

quick=()
tiny=()
results=$ROOT/benchmarks/results
known=(build check cpp tests adam short large)
only=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --quick) quick=(--numel 1M --repeats 3); tiny=(--quick) ;;
    --only)
      [[ $# -ge 2 && " ${known[*]} " == *" $2 "* ]] || { usage >&2; exit 2; }
      only+=("$2"); shift ;;
    --out) [ $# -ge 2 ] || { usage >&2; exit 2; }; results=$(realpath -m "$2"); shift ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done

# ------------------------------------------------------------------------------------------------- this machine
has_gpu() { nvidia-smi -L 2> /dev/null | grep -q '^GPU' || compgen -G '/dev/nvidia[0-9]*' > /dev/null; }

gpu_facts() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader 2> /dev/null \
    || echo "nvidia-smi is not on PATH"
}

nvcc_release() {
  local nvcc
  nvcc=$(command -v "${CUDACXX:-nvcc}") || { echo "not found: put it on PATH or set CUDACXX"; return; }
  "$nvcc" --version | sed -n 's/^.*release \([^,]*\).*$/\1/p'
}

if ! has_gpu; then
  say "no NVIDIA GPU here (nvidia-smi lists none, no /dev/nvidia*): nothing was built or measured"
  exit $EXIT_NO_GPU
fi
say "GPU, driver, memory, capability: $(gpu_facts | paste -sd ';')"
say "nvcc: $(nvcc_release)"

# ------------------------------------------------------------------------------------------------- stages
export GEMINI_CUDA=ON
export GEMINI_WERROR=OFF  # a compiler that warns of something new is no reason to measure nothing
export CUDAARCHS=${CUDAARCHS:-native}
mkdir -p build "$results"
: > "$LOG"

wanted() { [[ ${#only[@]} -eq 0 || " ${only[*]} " == *" $1 "* ]]; }

# Runs one named stage, shows its output and keeps it in the log. Later stages do not wait for its success.
summary=()
failures=0
left_out=0
stage() {
  local name=$1 start=$SECONDS verdict=ok
  shift
  say "$name ..."
  "$@" 2>&1 | tee -a "$LOG"
  case ${PIPESTATUS[0]} in
    0) ;;
    "$LEFT_OUT") verdict="left out"; left_out=$((left_out + 1)) ;;
    *) verdict=FAILED; failures=$((failures + 1)) ;;
  esac
  summary+=("$(printf '%-34s %-8s %4d s' "$name" "$verdict" $((SECONDS - start)))")
  [ "$verdict" = ok ]
}

finish() {
  say "summary"
  printf '  %s\n' "${summary[@]}" >&2
  [ "$failures" -eq 0 ] || { say "$failures failed; all output is in ${LOG#"$ROOT"/}"; exit 1; }
  [ "$left_out" -eq 0 ] || { say "$left_out left out, the others passed: this is not a full check"; exit 1; }
  [ -z "${result:-}" ] || ! compgen -G "${result%.json}*.json" > /dev/null || say "results: ${result%.json}*.json"
  if [ ${#only[@]} -eq 0 ]; then say "all passed"; else say "passed; the stages left out were not checked"; fi
  exit 0
}

build_in_venv() { PYTHON=${PYTHON:-python3} scripts/setup.sh; }

build_in_system() {
  "$python" -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
}

torch_sees_gpu() {
  "$python" - <<'END'
import sys

import torch

print("torch", torch.__version__, "CUDA", torch.version.cuda)
if not torch.cuda.is_available():
    sys.exit("this torch sees no GPU: install one built for CUDA, or set PYTHON and GEMINI_CHECK_VENV=system")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
END
}

kernel_is_built() {
  "$python" -c 'import sys; from gemini import _C; sys.exit(None if _C.build_info()["cuda"] else "built without CUDA")'
}

cpp_tests() {
  printf '#include <gtest/gtest.h>\n' | c++ -x c++ -std=c++20 -E - > /dev/null 2>&1 \
    || { echo "left out: GoogleTest is missing; add with: apt-get install libgtest-dev"; return $LEFT_OUT; }
  cmake --fresh -S . -B build/cpp-gpu -G Ninja -DGEMINI_BINDINGS=OFF -DGEMINI_TESTS=ON -DGEMINI_CUDA=ON > /dev/null \
    && cmake --build build/cpp-gpu -j "$JOBS" \
    && { ctest --test-dir build/cpp-gpu --output-on-failure --no-tests=error || return 1; } \
    && { GEMINI_NEEDS_GPU=1 build/cpp-gpu/cuda_driver_test || return 1; }  # ctest has a stand-in for the driver
}

# A skipped test is a failure here: this machine has what they need, but for those of several GPUs. Of the files that
# have none of these tests one may lack a package.
gpu_tests() {
  local report=build/gpu_tests.txt listing=build/gpu_tests_listing.txt collected=0 files
  "$python" -m pytest -m cuda --collect-only -q --color=no tests > "$listing" || collected=$?
  mapfile -t files < <(sed -n 's/^\(tests[^:]*\.py\):.*/\1/p' "$listing" | sort -u)
  [ ${#files[@]} -gt 0 ] || { cat "$listing"; return 1; }
  "$python" -m pytest -m cuda -rs --color=no "${files[@]}" | tee "$report"
  [ "${PIPESTATUS[0]}" -eq 0 ] || return 1
  [ "$collected" -eq 0 ] || { grep -A20 ERROR "$listing"; echo "a test file could not be read"; return 1; }
  if grep '^SKIPPED' "$report" | grep -qv 'needs two GPUs'; then echo "skipped tests that should have run"; return 1; fi
  grep -q 'needs two GPUs' "$report" && echo "one GPU: NCCL was not tried"
  return 0
}

bench_adam() { "$python" -m gemini.cli.main bench adam --device cuda --out "$result" ${quick[@]+"${quick[@]}"}; }

# Cases of `gemini bench gpu`, in a record that ends in the first argument.
bench_gpu() { "$python" -m gemini.cli.main bench gpu --out "${result%.json}_$1.json" ${tiny[@]+"${tiny[@]}"} --only "${@:2}"; }

if [ "${GEMINI_CHECK_VENV:-}" = system ]; then
  python=$(command -v "${PYTHON:-python3}") || { say "no ${PYTHON:-python3} on PATH"; exit 2; }
  stage "torch sees the GPU" torch_sees_gpu || finish
  if wanted build; then stage "build with CUDA" build_in_system || finish; fi
else
  python=$ROOT/.venv/bin/python
  if wanted build; then stage "build with CUDA" build_in_venv || finish; fi
  stage "torch sees the GPU" torch_sees_gpu || finish
fi
stage "the build has the CUDA kernel" kernel_is_built || finish
PATH=$(dirname "$python"):$PATH  # its cmake and ninja first

name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1)
name=$(printf '%s' "${name:-gpu}" | tr '[:upper:] ' '[:lower:]-' | tr -cd 'a-z0-9-')
result=$results/gpu_${name}_$(date +%Y%m%d).json

if wanted check; then stage "gemini check" "$python" -m gemini.cli.main check; fi
if wanted cpp; then stage "C++ tests" cpp_tests; fi
if wanted tests; then stage "GPU tests" gpu_tests; fi
if wanted adam; then stage "gemini bench adam --device cuda" bench_adam; fi
if wanted short; then stage "gemini bench gpu: short steps" bench_gpu runtime copies remap resident offload preop; fi
if wanted large; then stage "gemini bench gpu: bound, largest, peers" bench_gpu large bound largest peers; fi
finish
