# shellcheck shell=sh
# usage: proof-image.sh IMAGE
# An image of this host's own /bin/sh, with the libraries that it and nvidia-smi are linked to. What belongs to the driver is left
# out, for CDI brings it.
set -eu
image=$1
needs=$(ldd /bin/sh "$(command -v nvidia-smi || echo /bin/sh)" 2>/dev/null | grep -o '/[^ ]*' | sed 's/:$//' \
  | grep -vE 'nvidia|libcuda' | sort -u)
# shellcheck disable=SC2086  # paths of libraries, one a word
recipe=$(sha256sum /bin/sh $needs | sha256sum | cut -c 1-12)
if [ "$(docker image inspect --format '{{ index .Config.Labels "recipe" }}' "$image" 2>/dev/null)" = "$recipe" ]; then
  echo "is there: $image"
  exit
fi
# shellcheck disable=SC2086
{ printf '%s\n' /bin/sh $needs; } | sort -u \
  | tar --create --dereference --hard-dereference --absolute-names --files-from - \
  | docker import --change "LABEL recipe=$recipe" --change 'ENV PATH=/usr/bin:/bin' - "$image"
