#!/bin/sh
# usage: image.sh SUITE
# Bootstraps aerie-molecule:SUITE, a bare Debian with systemd and Python, from the package mirror that this machine's apt uses. An
# image that this very script made before is kept.
set -eu

suite=$1
image=aerie-molecule:$suite
# Scenarios begin together: one makes it, and the others wait for that.
exec 9>"/run/lock/aerie-molecule-$suite"
flock 9
recipe=$(sha256sum <"$0" | cut -c 1-12)
if [ "$(docker image inspect --format '{{ index .Config.Labels "recipe" }}' "$image" 2>/dev/null)" = "$recipe" ]; then
  echo "is there: $image"
  exit
fi

(
  flock 8
  command -v debootstrap >/dev/null && exit
  apt-get -q update
  DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends debootstrap
) 8>/run/lock/aerie-molecule
# What an update would fetch names the mirror also where no update was ever made.
mirror_of() { apt-get --print-uris update | sed -n "s|^'\\(.*\\)/dists/$1/InRelease' .*|\\1|p" | head -n 1; }
# shellcheck source=/dev/null
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
mirror=$(mirror_of "$release")
security=$(mirror_of "$release-security")
[ -n "$mirror" ] || { echo "E: this machine's apt has no Debian mirror to bootstrap $image from" >&2; exit 1; }

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
# The mode of mktemp's directory would become that of the image's root, which other users could then not enter.
chmod 755 "$root"
debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,python3,ca-certificates "$suite" "$root" "$mirror"
{
  echo "deb $mirror $suite main"
  echo "deb $mirror $suite-updates main"
  [ -z "$security" ] || echo "deb $security $suite-security main"
} >"$root/etc/apt/sources.list"
# Nobody reads translated descriptions, which take as long to fetch as the packages' list.
echo 'Acquire::Languages "none";' >"$root/etc/apt/apt.conf.d/languages"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar --create --numeric-owner --directory "$root" . | docker import --change "LABEL recipe=$recipe" - "$image"
