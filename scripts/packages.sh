# shellcheck shell=bash
# Sourced by scripts that need Debian packages, after scripts/narrate.sh.

is_installed() {
  [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# Installs those of the named packages that are missing.
ensure_packages() {
  command -v apt-get >/dev/null ||
    fail "this is not a Debian system; install the equivalents of these packages: $*"
  local package missing=()
  for package in "$@"; do
    is_installed "$package" || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then
    return
  fi
  ((EUID == 0)) || fail "packages are missing; run: sudo apt-get install ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  narrated "refreshing the package lists" apt-get update -qq
  narrated "installing ${missing[*]}" apt-get install -qq --yes --no-install-recommends "${missing[@]}"
}
