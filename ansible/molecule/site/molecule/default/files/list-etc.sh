#!/bin/sh
# usage: list-etc.sh FILE
# Writes every file, directory and link below /etc into FILE: its kind, mode, owner, group, and digest or target.
set -e
cd /etc
find . -xdev \( -type f -printf '%P %y %m %u %g ' -exec sha256sum {} \; \) -o -printf '%P %y %m %u %g %l\n' | sed 's| \./.*||' | sort >"$1"
