# shellcheck shell=sh
# What of Docker this host has, one NAME=VALUE a line. An empty value: not there, or it does not answer. $1: the data root to be.
say() { printf '%s=%s\n' "$1" "$2"; }

say uid "$(id -u)"
# Only the local daemon counts, whatever the caller's environment points to.
unset DOCKER_HOST DOCKER_CONTEXT
say binary "$(command -v dockerd)"
# Of this host: a daemon in a container has a network of its own. Where a plain user may not look, any counts.
network=$(readlink /proc/self/ns/net)
process=$(grep -lxs dockerd /proc/[0-9]*/comm | cut -d / -f 3 | while read -r pid; do
  [ "$(readlink "/proc/$pid/ns/net" || echo "$network")" != "$network" ] || { echo "$pid" && break; }
done)
say process "$process"
say program "$(readlink "/proc/$process/exe")"
# A daemon can hang and keep its clients waiting for ever.
if answer=$(timeout 15 docker version --format '{{.Server.Version}}' 2>&1); then
  say engine "$(echo "$answer" | tail -n 1)"
  say problem ''
else
  [ $? != 124 ] || answer='no answer in 15 s'
  say engine ''
  say problem "$(echo "$answer" | paste -s -d ' ')"
fi
say root "$(timeout 15 docker info --format '{{.DockerRootDir}}' 2>/dev/null)"
say compose "$(docker compose version --short 2>/dev/null | sed 's/^v//')"
say buildx "$(docker buildx version 2>/dev/null | sed -n 's/^[^ ]* v\{0,1\}\([0-9][^ ]*\).*/\1/p')"
# The package that a present engine came from decides where its plugins come from.
say package "$(dpkg-query --search "$(command -v dockerd || echo /none)" 2>/dev/null | cut -d : -f 1)"
directory=${1:-/var/lib/docker}
while [ ! -d "$directory" ]; do directory=$(dirname "$directory"); done
say free_gb "$(df -Pk "$directory" | awk 'NR == 2 { print int($4 / 1000 / 1000 * 1.024) }')"
