#!/usr/bin/env bash
# Loads images into the containerd of the node this runs on.
# Usage: load-images.sh DIRECTORY | FILE.tar
set -euo pipefail
files=("$1")
[[ ! -d $1 ]] || files=("$1"/*.tar)
for file in "${files[@]}"; do
  ctr --namespace k8s.io images import --no-unpack "$file"
done
