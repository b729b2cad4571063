#!/usr/bin/env bash
# Builds the documentation site from docs/ and mkdocs.yml into <cache>/s3csi/site. Broken links, pages that are missing or not
# in the navigation, and dead anchors are errors. The Python packages are pinned in tools/docs/requirements.txt and installed
# once, into a virtual environment in the user's cache that is named after the hash of that file.
# Usage: scripts/docs.sh [serve]
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh

readonly REQUIREMENTS=tools/docs/requirements.txt
readonly CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/s3csi
readonly SITE=$CACHE/site

install_packages() {
  local directory=$1
  command -v python3 >/dev/null || fail "python3 is not installed; run: make setup"
  # A virtual environment contains its own path and cannot be renamed into place, so an incomplete one is removed and recreated.
  rm -rf "$directory"
  python3 -m venv "$directory" || fail "python3 cannot create a virtual environment; run: apt-get install python3-venv"
  narrated "installing the documentation tools (once)" \
    "$directory/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement $REQUIREMENTS
  touch "$directory/complete"
}

mkdir -p "$CACHE"
exec 9>"$CACHE/docs.lock"
flock 9
hash=$(cat $REQUIREMENTS <(python3 --version 2>&1) | sha256sum | cut --characters=1-16)
readonly environment=$CACHE/docs-$hash
[[ -e $environment/complete ]] || install_packages "$environment"

# Material prints an advertisement for its own future to standard error otherwise.
export NO_MKDOCS_2_WARNING=1
if [[ ${1:-} == serve ]]; then
  exec 9>&-
  exec "$environment/bin/mkdocs" serve
fi
# Not --quiet: it hides warnings from --strict, too.
"$environment/bin/mkdocs" build --strict --site-dir "$SITE"
say "$SITE/index.html: $(find "$SITE" -name '*.html' | wc -l) pages"
