#!/usr/bin/env bash
# build_images.sh FOLDER PYTHON: each role's image as FOLDER/ROLE, and FOLDER/ROLE.env with a line for each variable.
# buildah needs no container engine: RUN's steps run in a chroot. The base is Debian with its Python and PYTHON's
# settings of pip (a local index has files beside `simple`). The worker has the wheel's UCX: no CUDA base is at hand.
set -euo pipefail
folder=$1 python=$2 base=$1/base
buildah() { unshare --mount buildah --root "$folder/store" --runroot "$folder/run" "$@"; }
debootstrap --variant=minbase --include=python3-venv,python-is-python3,ca-certificates bookworm "$base"
{ echo "[global]"; "$python" -m pip config list | sed -E "s/^.*\.([a-z-]+)='(.*)'$/\1 = \2/" | awk '!seen[$1]++'; } > "$base/etc/pip.conf"
options=(--isolation chroot --build-arg BASE=localhost/base --build-arg UCX=ucx-none)
for path in $(sed 's,file://,,g' "$base/etc/pip.conf" | tr ' ' '\n' | grep '^/' | sed 's,/simple/*$,,' | sort -u); do
  if [ -e "$path" ]; then options+=(--volume "$path:$path:ro"); fi
done
tar -C "$base" -cf "$folder/base.tar" .
printf 'FROM scratch\nADD base.tar /\n' > "$folder/base.Dockerfile"
buildah build --tag base --file "$folder/base.Dockerfile" "$folder"
for role in worker router controller; do
  buildah build "${options[@]}" --tag "$role" --output "$folder/$role" --file "deploy/images/$role.Dockerfile" .
  buildah inspect --type image --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$role" > "$folder/$role.env"
done
