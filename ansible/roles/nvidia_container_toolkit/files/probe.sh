# shellcheck shell=sh disable=SC2016
# What of the container toolkit this host has, one NAME=VALUE a line. An empty value: not there.
say() { printf '%s=%s\n' "$1" "$2"; }

say uid "$(id -u)"
installed() {
  dpkg-query --show --showformat "\${db:Status-Status} $1\n" nvidia-container-toolkit-base nvidia-container-toolkit \
    libnvidia-container-tools libnvidia-container1 2>/dev/null | sed -n 's/^installed //p'
}
say version "$(installed '${Package} ${Version}' | sed -n 's/^nvidia-container-toolkit-base //p')"
# What of the family is there: they name each other's versions.
say family "$(installed '${Package}' | paste -s -d ' ')"
say unheld "$(installed '${db:Status-Want} ${Package}' | sed '/^hold /d; s/.* //' | paste -s -d ' ')"
say program "$(nvidia-ctk --version 2>/dev/null | sed -n 's/.* version \([0-9][^ ]*\).*/\1/p' | head -n 1)"
if [ -e /etc/apt/sources.list.d/aerie-nvidia-container-toolkit.sources ]; then say ours yes; else say ours no; fi
# Another source of the same repository, with a key of its own. Files of other names apt does not read.
say sources "$(grep -lsE '^[^#]*libnvidia-container' /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources \
  | grep -v /aerie-nvidia-container-toolkit.sources | paste -s -d ' ')"
# The driver that is loaded, as the kernel module itself tells it.
say driver "$(sed -n 's/^NVRM version:.* \([0-9][0-9]*\.[0-9.]*\) .*/\1/p' /proc/driver/nvidia/version 2>/dev/null)"
