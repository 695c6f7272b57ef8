#!/usr/bin/env bash
# Builds, tests and benchmarks everything that needs a GPU, stage by stage. `scripts/gpu_check.sh --help` says more.
set -uo pipefail
cd "$(dirname "$0")/.."

ROOT=$PWD
JOBS=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
EXIT_NO_GPU=3
LEFT_OUT=77  # what a stage returns that lacks something to run with
STOPPED=124  # what `timeout` returns

# The stages in their order, and the seconds without which starting one is no use.
STAGES=(build:20 check:5 cpp:10 smoke:15 laws:40 kernel:20 ranks:30 others:15
  adam:20 copies:15 remap:10 preop:15 resident:40 offload:60 bound:120 largest:180 peers:120)

usage() {
  cat <<'END'
Build, test and benchmark everything that needs a GPU.

  scripts/gpu_check.sh [--minutes N] [--only STAGE]... [--again] [--quick] [--kit FOLDER] [--out FOLDER] [--state FILE]

  --minutes N    stop within N minutes and say what is left; the next call goes on there
  --only STAGE   one of build, check, cpp, smoke, laws, kernel, ranks, others (tests), adam, copies, remap, preop,
                 resident, offload, bound, largest, peers (benchmarks), in this order; several where it is repeated.
                 It runs whether or not it has run before
  --again        forget what earlier calls have done
  --quick        everything tiny in the benchmarks: do they run? No figures.
  --kit FOLDER   what scripts/gpu_kit.sh has built elsewhere for this machine's Python: nothing is compiled here
  --out FOLDER   where gpu_<name>_<date>_<stage>.json go (default: benchmarks/results)
  --state FILE   what has been done, a line per stage (default: build/gpu_check.state); logs go beside it

environment:
  PYTHON                     the interpreter to start from (default python3)
  GEMINI_CHECK_VENV=system   use that interpreter and its packages as they are instead of making .venv: for machines
                             without a network. It must have a torch that sees the GPU, pytest, hypothesis, psutil,
                             numpy, scipy, safetensors, rich; without a kit pybind11, setuptools, and cmake and ninja
                             on PATH. Where it has pytest-xdist, tests share the GPU.
  CUDAARCHS                  the GPUs to build for, as CMake writes them (default: native, the ones in this machine)

exit codes: 0 all passed; 1 something failed or was left out, see the summary and the stage's log;
            2 wrong usage; 3 no GPU here; 4 out of time, what ran passed
END
}

say() { printf '[gpu_check] %s\n' "$*" >&2; }

bench_size=
adam_size=
results=$ROOT/benchmarks/results
state=$ROOT/build/gpu_check.state
kit=
again=
deadline=
only=()
known=" ${STAGES[*]%%:*} "
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --quick) adam_size="--numel 1M --repeats 3"; bench_size=--quick ;;
    --again) again=yes ;;
    --only | --out | --state | --kit | --minutes)
      [ $# -ge 2 ] || { usage >&2; exit 2; }
      case $1 in
        --only) [[ $known == *" $2 "* ]] || { usage >&2; exit 2; }; only+=("$2") ;;
        --out) results=$(realpath -m "$2") ;;
        --state) state=$(realpath -m "$2") ;;
        --kit) kit=$(realpath -m "$2") ;;
        --minutes) [[ $2 =~ ^[1-9][0-9]*$ ]] || { usage >&2; exit 2; }; deadline=$(($2 * 60)) ;;
      esac
      shift ;;
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

if ! has_gpu; then
  say "no NVIDIA GPU here (nvidia-smi lists none, no /dev/nvidia*): nothing was built or measured"
  exit $EXIT_NO_GPU
fi
say "GPU, driver, memory, capability: $(gpu_facts | paste -sd ';')"

# ------------------------------------------------------------------------------------------------- stages
export GEMINI_CUDA=ON
export GEMINI_WERROR=OFF  # a compiler that warns of something new is no reason to measure nothing
export CUDAARCHS=${CUDAARCHS:-native}
export PYTHONUNBUFFERED=1
logs=$(dirname "$state")
mkdir -p build "$results" "$logs"
[ -z "$again" ] || rm -f "$state"
touch "$state"

seconds_left() { if [ -n "$deadline" ]; then echo $((deadline - SECONDS)); else echo 100000; fi; }

wanted() { [[ ${#only[@]} -eq 0 || " ${only[*]} " == *" $1 "* ]]; }

# What an earlier call wrote of a stage: "STAGE VERDICT SECONDS". The last line counts.
earlier() { awk -v name="$1" '$1 == name {verdict = $2} END {print verdict}' "$state"; }

# Runs `stage_NAME` with what is left of the time, shows its output, keeps it in a log and writes the verdict at once.
# Later stages do not wait for its success. One that has been judged is not run again unless it is named.
stage() {
  local name=$1 least=$2 begin=$SECONDS verdict left
  wanted "$name" || return 0
  [[ ${#only[@]} -gt 0 || $(earlier "$name") != ok && $(earlier "$name") != FAILED ]] || return 0
  left=$(seconds_left)
  if [ "$left" -lt "$least" ]; then echo "$name no-time 0" >> "$state"; return 0; fi
  say "$name ... ($left s left)"
  # In a session of its own: what it starts ends with it.
  timeout --kill-after=5 "$left" bash -c "stage_$name" 2>&1 | tee "$logs/gpu_check_$name.log"
  case ${PIPESTATUS[0]} in
    0) verdict=ok ;;
    "$LEFT_OUT") verdict=left-out ;;
    "$STOPPED" | 137) verdict=no-time ;;
    *) verdict=FAILED ;;
  esac
  echo "$name $verdict $((SECONDS - begin))" >> "$state"
  say "$name: $verdict, $((SECONDS - begin)) s"
  [ "$verdict" = ok ]
}

finish() {
  local entry name verdict code=0
  say "summary"
  for entry in "${STAGES[@]}"; do
    name=${entry%%:*}
    wanted "$name" || continue
    verdict=$(earlier "$name")
    printf '  %-10s %s\n' "$name" "${verdict:-not run}" >&2
    case $verdict in
      ok) ;;
      FAILED | left-out) code=1 ;;
      *) [ $code -ne 0 ] || code=4 ;;
    esac
  done
  say "logs: $logs/gpu_check_*.log; records: $results"
  [ $code -ne 4 ] || say "out of time: call again to go on"
  [ $code -ne 0 ] || say "passed"
  exit $code
}

# -- build
stage_build() {
  if [ -n "$kit" ]; then
    cp "$kit"/_C.*.so gemini/
  elif [ "${GEMINI_CHECK_VENV:-}" = system ]; then
    "$python" -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e . -e ./benchmarks || return 1
  else
    PYTHON=${PYTHON:-python3} scripts/setup.sh || return 1
  fi
  "$python" - <<'END'
import sys

import torch
from gemini import _C

print("torch", torch.__version__, "CUDA", torch.version.cuda, "module", _C.build_info())
if not torch.cuda.is_available():
    sys.exit("this torch sees no GPU: install one built for CUDA, or set PYTHON and GEMINI_CHECK_VENV=system")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
sys.exit(None if _C.build_info()["cuda"] else "built without CUDA")
END
}

stage_check() { "$python" -m gemini check; }

# -- tests
stage_cpp() {
  if [ -n "$kit" ]; then
    GEMINI_NEEDS_GPU=1 "$kit/cuda_driver_test"
    return
  fi
  printf '#include <gtest/gtest.h>\n' | c++ -x c++ -std=c++20 -E - > /dev/null 2>&1 \
    || { echo "left out: GoogleTest is missing; add with: apt-get install libgtest-dev"; return "$LEFT_OUT"; }
  cmake --fresh -S . -B build/cpp-gpu -G Ninja -DGEMINI_BINDINGS=OFF -DGEMINI_TESTS=ON -DGEMINI_CUDA=ON > /dev/null \
    && cmake --build build/cpp-gpu -j "$JOBS" \
    && ctest --test-dir build/cpp-gpu --output-on-failure --no-tests=error \
    && GEMINI_NEEDS_GPU=1 build/cpp-gpu/cuda_driver_test  # ctest has a stand-in for the driver
}

# gpu_tests FILE...: those of their tests that need a GPU. A skipped one is a failure, as this machine has what they
# need, but for those of several GPUs; where all others that were skipped lack a package, the stage is left out.
gpu_tests() {
  local report spread=()
  report=$(mktemp)
  ! "$python" -c 'import xdist' 2> /dev/null || spread=(-n "$((JOBS < 6 ? JOBS : 6))" --dist worksteal)
  "$python" -m pytest -m cuda -rs --color=no -q -p no:cacheprovider ${spread[@]+"${spread[@]}"} "$@" | tee "$report"
  [ "${PIPESTATUS[0]}" -eq 0 ] || return 1
  if grep '^SKIPPED' "$report" | grep -qv 'needs two GPUs\|comes with'; then echo "skipped tests that should have run"; return 1; fi
  ! grep -q 'needs two GPUs' "$report" || echo "one GPU: NCCL was not tried"
  if grep -q '^SKIPPED.*comes with' "$report"; then echo "left out: tests of packages that are not installed"; return "$LEFT_OUT"; fi
}

stage_smoke() { gpu_tests tests/training/test_gpu_smoke.py; }
stage_laws() { gpu_tests tests/training --ignore=tests/training/test_gpu_smoke.py; }
stage_kernel() { gpu_tests tests/unit/test_gpu_adam.py; }
stage_ranks() { gpu_tests tests/parallel; }
stage_others() { gpu_tests tests --ignore=tests/training --ignore=tests/parallel --ignore=tests/unit/test_gpu_adam.py; }

# -- benchmarks, a record each
# Named from here, where it is below: records keep the command that made them, and no path of this machine.
record() { echo "${results#"$PWD"/}/gpu_${gpu_name}_$(date +%Y%m%d)_$1.json"; }

stage_adam() { "$python" -m gemini_bench adam --device cuda --out "$(record adam)" $adam_size; }

bench_gpu() { "$python" -m gemini_bench gpu --out "$(record "$1")" $bench_size --only "$1"; }
for name in copies remap preop resident offload bound largest peers; do
  eval "stage_$name() { bench_gpu $name; }"
done

# ------------------------------------------------------------------------------------------------- what runs
if [ "${GEMINI_CHECK_VENV:-}" = system ]; then
  python=$(command -v "${PYTHON:-python3}") || { say "no ${PYTHON:-python3} on PATH"; exit 2; }
else
  python=$ROOT/.venv/bin/python
  PATH=$(dirname "$python"):$PATH  # its cmake and ninja first
fi
if [ -n "$kit" ]; then
  # Nothing is installed: the folders laid out as they would be.
  rm -rf build/gpu-view && mkdir -p build/gpu-view/gemini
  cp "$kit"/_C.*.so gemini/
  ln -s "$ROOT"/gemini/* build/gpu-view/gemini/
  ln -s "$ROOT/parallel" build/gpu-view/gemini/parallel
  ln -s "$ROOT/benchmarks/gemini_bench" build/gpu-view/gemini_bench
  export PYTHONPATH=$ROOT/build/gpu-view${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
fi
gpu_name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1)
gpu_name=$(printf '%s' "${gpu_name:-gpu}" | tr '[:upper:] ' '[:lower:]-' | tr -cd 'a-z0-9-')
export python kit results gpu_name adam_size bench_size LEFT_OUT JOBS
while read -r name; do export -f "${name?}"; done < <(declare -F | awk '$3 ~ /^(stage_|gpu_tests|record|bench_gpu)/ {print $3}')

for entry in "${STAGES[@]}"; do
  stage "${entry%%:*}" "${entry##*:}" || [ "${entry%%:*}" != build ] || break
done
finish
