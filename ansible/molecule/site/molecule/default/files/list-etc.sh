#!/bin/sh
# usage: list-etc.sh FILE
# Writes every file, directory and link below /etc into FILE: its kind, mode, owner, group, and digest or target. Left out is what a
# boot writes there: systemd its note of an update, and a container's engine the names of the container.
set -e
cd /etc
find . -xdev \( -path ./.updated -o -path ./hosts -o -path ./hostname -o -path ./resolv.conf \) -prune -o \
  \( -type f -printf '%P %y %m %u %g ' -exec sha256sum {} \; \) -o -printf '%P %y %m %u %g %l\n' | sed 's| \./.*||' | sort >"$1"
