#!/usr/bin/env bash
# Installs the programs that only `make compatibility` runs: Debian packages, and Python packages in <cache>/s3csi/compatibility/python.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh

readonly ROOT=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi/compatibility
readonly PYTHON_PACKAGES=(numpy==2.2.6 h5py==3.13.0 pyarrow==20.0.0)

ensure_debian_packages() {
  local package missing=()
  for package in nano logrotate fio stress-ng postgresql; do
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  # Other distributors' packages of Node.js contain npm.
  command -v npm >/dev/null || missing+=(nodejs npm)
  if ((${#missing[@]} == 0)); then
    return
  fi
  ((EUID == 0)) || fail "packages are missing; run: sudo apt-get install ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  narrated "refreshing the package lists" apt-get update -qq
  narrated "installing ${missing[*]}" apt-get install -qq --yes --no-install-recommends "${missing[@]}"
}

ensure_python_packages() {
  local installed=$ROOT/python/installed
  if [[ -e $installed && $(<"$installed") == "${PYTHON_PACKAGES[*]}" ]]; then
    return
  fi
  rm -rf "$ROOT/python"
  mkdir -p "$ROOT"
  python3 -m venv "$ROOT/python" || fail "python3 cannot create a virtual environment; run: apt-get install python3-venv"
  narrated "fetching ${PYTHON_PACKAGES[*]}" \
    "$ROOT/python/bin/pip" install --quiet --disable-pip-version-check "${PYTHON_PACKAGES[@]}"
  echo "${PYTHON_PACKAGES[*]}" >"$installed"
}

ensure_debian_packages
ensure_python_packages
