#!/usr/bin/env bash
# Builds what scripts/gpu_check.sh needs, on a machine without a GPU, so that the minutes on one with a GPU go into answers.
#
#   scripts/gpu_kit.sh PYTHON [FOLDER]    FOLDER is build/gpu-kit where none is named
#
# PYTHON is an interpreter of the other machine's version, with its headers, that can make a virtual environment. FOLDER then holds the
# extension module with the CUDA kernel and the C++ tests of the driver; take it along and call there:
#
#   GEMINI_CHECK_VENV=system scripts/gpu_check.sh --kit FOLDER --minutes 9
#
# CUDAARCHS names the GPUs to build for, as CMake writes them (default: 90, Hopper). Needs nvcc and GoogleTest.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -ge 1 ] && [ $# -le 2 ] && [[ $1 != -* ]] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
python=$1
kit=${2:-build/gpu-kit}
work=build/gpu-kit-work
mkdir -p "$work" "$kit"

suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
venv=$work/venv$suffix
[ -x "$venv/bin/ninja" ] || { "$python" -m venv --clear "$venv" && "$venv/bin/pip" install -q -c constraints.txt pybind11 cmake ninja; }

export CUDAARCHS=${CUDAARCHS:-90}
"$venv/bin/cmake" -S . -B "$work/cmake$suffix" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/$venv/bin/ninja" -DGEMINI_CUDA=ON -DGEMINI_TESTS=ON \
  -DPython_EXECUTABLE="$PWD/$venv/bin/python" -Dpybind11_DIR="$("$venv/bin/python" -m pybind11 --cmakedir)" > /dev/null
"$venv/bin/cmake" --build "$work/cmake$suffix" --target _C cuda_driver_test
cp "$work/cmake$suffix/_C$suffix" "$work/cmake$suffix/cuda_driver_test" "$kit/"
strip --strip-unneeded "$kit"/*
du -h "$kit"/*
