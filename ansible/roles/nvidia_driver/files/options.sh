# shellcheck shell=sh
# usage: options.sh MODULE.OPTION=VALUE...: one line for each that a loaded module has another value for.
for wanted; do
  name=${wanted%%=*}
  file=/sys/module/${name%%.*}/parameters/${name#*.}
  [ -r "$file" ] || continue
  # Truth values read as Y and N.
  value=$(sed 's/^Y$/1/; s/^N$/0/' "$file")
  [ "$value" = "${wanted#*=}" ] || echo "$name=$value"
done
