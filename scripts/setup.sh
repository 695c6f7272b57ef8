#!/usr/bin/env bash
# Makes the checkout ready to run: system packages, .venv with the versions of constraints.txt, the build.
# Each stage leaves a stamp holding a hash of what it depends on, so a second call takes a moment.
# Used by the Makefile; PYTHON names the interpreter to start from (default python3). `scripts/setup.sh browser` installs
# the Chromium that `make docs` looks at the site with, and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv
readonly STAMPS=$VENV/stamps
readonly BUILD_TOOLS=(setuptools wheel pybind11 cmake ninja)
readonly LIBRARIES=(torch==2.13.0 psutil numpy scipy safetensors rich matplotlib)
readonly INTEGRATED=("transformers>=5" accelerate peft trl lightning gguf tensorboard fastapi uvicorn openai torchao bitsandbytes)
readonly ALONE=(timm)  # without torchvision, which package indexes have for torch with CUDA only
readonly CHECKERS=(pytest pytest-xdist hypothesis ruff mypy clang-format clang-tidy proselint)
readonly SITE=(mkdocs-material "mkdocstrings[python]")

say() { printf '[setup] %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
python=${PYTHON:-python3}
export GEMINI_WERROR=${GEMINI_WERROR:-ON}

digest() { { printf '%s\n' "$@"; cat; } | sha256sum | cut -d' ' -f1; }
is_fresh() { [ "$(cat "$STAMPS/$1" 2>/dev/null)" = "$2" ]; }
mark() { mkdir -p "$STAMPS" && printf '%s\n' "$2" > "$STAMPS/$1"; }

# Runs a command whose output matters only when it fails.
quietly() {
  local log
  log=$(mktemp)
  if "$@" > "$log" 2>&1; then rm -f "$log"; return 0; fi
  cat "$log" >&2
  rm -f "$log"
  return 1
}

has_header() { printf '#include <%s>\n' "$1" | c++ -x c++ -std=c++20 -E - > /dev/null 2>&1; }

missing_packages() {
  has_header liburing.h || echo liburing-dev
  has_header gtest/gtest.h || echo libgtest-dev
  command -v ccache > /dev/null || echo ccache
  "$python" -c 'import ensurepip' 2>/dev/null || echo python3-venv
  [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || echo python3-dev
}

# install_system_packages PACKAGES: as root or with sudo, by apt-get; where this is not possible, say so and go on.
install_system_packages() {
  local root=() missing=("$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo > /dev/null || ! sudo -n true 2>/dev/null; then
      say "going on without ${missing[*]}: needs root; add with: sudo apt-get install ${missing[*]}"
      return 0
    fi
    root=(sudo -n)
  fi
  if ! command -v apt-get > /dev/null; then
    say "going on without ${missing[*]}: no apt-get here"
    return 0
  fi
  say "installing system packages: ${missing[*]}"
  local install=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends)
  "${install[@]}" "${missing[@]}" > /dev/null 2>&1 && return 0
  "${root[@]}" apt-get update > /dev/null 2>&1 || true
  "${install[@]}" "${missing[@]}" > /dev/null 2>&1 || say "going on without ${missing[*]}: apt-get could not install them"
}

check_toolchain() {
  command -v "$python" > /dev/null || die "no $python on PATH; install Python 3.10 or newer, or set PYTHON"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is older than 3.10; set PYTHON"
  command -v c++ > /dev/null || die "no C++ compiler (c++) on PATH; install g++ 11 or newer: apt-get install g++"
}

make_venv() {
  local want
  # The path is part of it: a virtual environment does not survive being copied or moved.
  want=$(digest "$PWD" "$("$python" -c 'import sys; print(sys.base_prefix, sys.version)')" \
    "${BUILD_TOOLS[@]}" "${LIBRARIES[@]}" "${INTEGRATED[@]}" "${ALONE[@]}" "${CHECKERS[@]}" "${SITE[@]}" < constraints.txt)
  if is_fresh venv "$want"; then return; fi
  check_toolchain
  local missing
  mapfile -t missing < <(missing_packages)
  install_system_packages "${missing[@]}"
  say "creating $VENV and installing the pinned packages (the first time takes some minutes)"
  # Where the shell has the environment active, $python is its own: what makes it anew must not lie in it.
  python=$("$python" -c 'import sys; print(sys._base_executable)')
  # In two steps, because venv hides what ensurepip says when it fails.
  quietly "$python" -m venv --clear --without-pip "$VENV" || die "could not create $VENV"
  quietly "$VENV/bin/python" -m ensurepip --default-pip \
    || die "no pip in $VENV; if ensurepip is missing, on Debian: apt-get install python3-venv"
  local group
  for group in BUILD_TOOLS LIBRARIES INTEGRATED CHECKERS SITE; do
    local -n names=$group
    say "  ${names[*]}"
    quietly "$VENV/bin/python" -m pip install --disable-pip-version-check -c constraints.txt "${names[@]}" \
      || die "pip could not install ${names[*]}"
  done
  quietly "$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps -c constraints.txt "${ALONE[@]}" \
    || die "pip could not install ${ALONE[*]}"
  mark venv "$want"
}

build() {
  local want
  want=$(find csrc gemini parallel benchmarks CMakeLists.txt setup.py pyproject.toml -type f \
    \( -path 'csrc/*' -o -name '__init__.py' -o -name CMakeLists.txt -o -name setup.py -o -name pyproject.toml \) \
    -print0 | LC_ALL=C sort -z | xargs -0 sha256sum \
    | digest "${GEMINI_CUDA:-}" "${GEMINI_URING:-}" "$GEMINI_WERROR" "$(missing_packages)" "$(cat "$STAMPS/venv")")
  if is_fresh build "$want" && compgen -G 'gemini/_C.*.so' > /dev/null; then return; fi
  say "compiling the C++ core, 2 to 7 minutes on two cores; later calls only compile what changed"
  quietly "$VENV/bin/python" -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e . -e ./benchmarks \
    || die "the build failed"
  quietly "$VENV/bin/python" -c 'import gemini, gemini_bench' || die "the build does not import"
  mark build "$want"
}

case "${1:-}" in
  '') make_venv; build ;;
  browser) "$python" scripts/site_browser.py --which > /dev/null 2>&1 || install_system_packages chromium-headless-shell ;;
  *) die "only 'browser' may follow, not '$1'" ;;
esac
