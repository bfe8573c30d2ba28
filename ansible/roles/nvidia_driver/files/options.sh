# shellcheck shell=sh
# usage: options.sh MODULE.OPTION=VALUE...: one line for each that a loaded module has another value for.
# Truth values read as Y and N, and numbers as decimal ones, however they were given.
plain() {
  case $1 in
    [Yy]) echo 1 ;;
    [Nn]) echo 0 ;;
    0[xX]*) printf '%d\n' "$1" 2>/dev/null || echo "$1" ;;
    *) echo "$1" ;;
  esac
}
for wanted; do
  name=${wanted%%=*}
  file=/sys/module/${name%%.*}/parameters/${name#*.}
  [ -r "$file" ] || continue
  value=$(plain "$(cat "$file")")
  [ "$value" = "$(plain "${wanted#*=}")" ] || echo "$name=$value"
done
