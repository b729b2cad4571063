#!/usr/bin/env bash
# Searches every log of the last `make test` for secret values.
#
# Every secret of the testbed contains MARK, so that one search finds them all, also inside longer text. The first check proves
# that the search can find one.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/narrate.sh
source scripts/narrate.sh
: "${S3CSI_LOG_DIR:?is set by the Makefile; run this through make}"

# Letters only: URL encoding, JSON and shell quoting do not change it.
readonly MARK=NeverPrintThis

grep --quiet --recursive --fixed-strings "$MARK" crates/testbed/src ||
  fail "no secret of the testbed contains $MARK, so this search would find nothing; make them match"
logs=$(find "$S3CSI_LOG_DIR" -type f -name '*.log' 2>/dev/null | wc -l)
((logs > 0)) || fail "there are no logs in $S3CSI_LOG_DIR; run: make test"
if grep --recursive --fixed-strings --line-number "$MARK" "$S3CSI_LOG_DIR"; then
  fail "the lines above contain a secret value"
fi
say "no secret value in $logs logs"
