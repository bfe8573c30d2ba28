# shellcheck shell=sh
# What of the tool and of the models this host has, one NAME=VALUE a line. $1: the models' directory. $2: the tool's. $3: the launcher, and
# $4 what one of the role's has in it. $5: the Python that is asked for, or nothing. The rest: names of models.
models=$1 place=$2 launcher=$3 mark=$4 wanted=$5
shift 5
say() { printf '%s=%s\n' "$1" "$2"; }

say uid "$(id -u)"
python=''
for each in ${wanted:-python3 python3.13 python3.12 python3.11}; do
  "$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && python=$each && break
done
say python "$python"
version=$("${python:-${wanted:-python3}}" --version 2>/dev/null | head -n 1)
say python_version "$version"
say venv "$("${python:-false}" -c 'import ensurepip, venv; print("yes")' 2>/dev/null)"

# Of another Python, as after an upgrade of the release, its packages are not found.
complete=''
if [ "$(cat "$place/.complete" 2>/dev/null)" = "$version" ] && "$place/venv/bin/python" -c '' 2>/dev/null; then complete=yes; fi
say complete "$complete"
if [ ! -e "$launcher" ]; then say launcher none
elif grep -qsF -- "$mark" "$launcher"; then say launcher ours
else say launcher other
fi

models_are=''
[ ! -d "$models" ] || models_are=yes
say models "$models_are"
# Bytes for what is to be fetched; what is half fetched already, `aerie model fetch --dry-run` leaves out.
directory=$models
while [ ! -d "$directory" ]; do directory=$(dirname "$directory"); done
say room "$(df -Pk "$directory" | awk 'NR == 2 { printf "%.0f", $4 * 1024 }')"
# The image's user has to come through to the models.
closed=''
directory=$models
while [ "$directory" != / ]; do
  if [ -d "$directory" ]; then
    case $(stat --dereference --format %A "$directory") in *[xt]) ;; *) closed=$directory ;; esac
  elif [ -e "$directory" ]; then closed=$directory
  fi
  directory=$(dirname "$directory")
done
say closed "$closed"
# A directory with files of a model and no revision, as they lay before there were revisions.
flat=''
for name in "$@"; do
  [ ! -e "$models/$name/current" ] && [ -f "$models/$name/config.json" ] && flat="$flat $name"
done
say flat "$flat"
