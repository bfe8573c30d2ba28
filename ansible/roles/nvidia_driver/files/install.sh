# shellcheck shell=sh
# usage: install.sh LOCK_TIMEOUT SOURCE FAMILY PINNING PRESENT NEXT_KERNEL RUNNING_KERNEL PACKAGE...
# Updates apt from SOURCE (empty: from none in particular), whose signature must be good, and from the others as far as they answer.
# Then the pin, headers for both kernels, metapackages of headers beside those of images, and the packages. A PACKAGE with a minus at
# its end goes in the same step. FAMILY is an expression for the driver's packages. PRESENT is the release of the driver that stays, and
# in which the packages come, too; empty: none does.
set -eu
lock=$1 source=$2 family=$3 pinning=$4 present=$5 next=$6 running=$7
shift 7
work=$(mktemp -d)
finish() { rm -rf "$work"; }
trap finish EXIT
installed() { dpkg-query --show --showformat '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^installed //p'; }
# What goes, goes with its configuration: a pin, or another driver's options of modules, would still work.
install() {
  apt-get -q install --yes --purge --no-install-recommends --allow-downgrades --allow-change-held-packages \
    -o "DPkg::Lock::Timeout=$lock" "$@"
}

if [ -n "$source" ]; then
  # Whatever is wrong with those is not this driver's.
  apt-get -q update 2>&1 | sed 's/^/others: /'
  # A source of which only an older index is there is no error to apt, and a forged one must not pass for that.
  apt-get -q update -o APT::Update::Error-Mode=any -o APT::Get::List-Cleanup=0 \
    -o "Dir::Etc::sourcelist=$source" -o Dir::Etc::sourceparts=-
else
  apt-get -q update
fi

pins=$(installed 'nvidia-driver-pinning-*')
if [ -n "$present" ]; then
  # The driver is loaded from it: libraries of another release would not get on with it. A pin that is there was chosen with it.
  {
    printf 'Package: /%s/\nPin: version /^([0-9]+:)?%s-/\nPin-Priority: 1001\n\n' "$family" "$(echo "$present" | sed 's/[.]/[.]/g')"
    cat /etc/apt/preferences 2>/dev/null || true
  } >"$work/preferences"
  set -- -o "Dir::Etc::preferences=$work/preferences" "$@"
  [ -z "$pins" ] || pinning=''
else
  # A held library keeps its release, and so those that need the same one. Held again in any case, and what is new by the role.
  held=$(apt-mark showhold | grep -E "($family)" | grep -v container || true)
  if [ -n "$held" ]; then
    finish() {
      rm -rf "$work"
      # shellcheck disable=SC2086  # names
      for name in $(installed $held); do apt-mark hold "$name" || true; done
    }
    # shellcheck disable=SC2086
    apt-mark unhold $held
  fi
fi
# Where apt has the distribution's own driver alone, it has no such package, nor another branch under the same names.
if [ -z "$source" ] && ! apt-cache show "$pinning" >/dev/null 2>&1; then pinning=''; fi
# One pin at a time: two of them would let both releases in.
if [ -n "$pinning" ]; then
  # shellcheck disable=SC2046  # names
  install "$pinning" $(echo "$pins" | sed "/^$pinning\$/d; s/..*/&-/")
fi

[ -e "/lib/modules/$next/build" ] || set -- "$@" "linux-headers-$next"
# Headers of a kernel that only still runs may be out of the archive, and the next boot does without.
if [ "$running" != "$next" ] && [ ! -e "/lib/modules/$running/build" ] && apt-cache show "linux-headers-$running" >/dev/null 2>&1; then
  set -- "$@" "linux-headers-$running"
fi
# Else a kernel that arrives later would arrive without what its modules are built with. Of the image's own version: a newer one would
# bring headers of a kernel that is not there.
for image in $(dpkg-query --show --showformat '${db:Status-Status} ${Package}=${Version}\n' 'linux-image-*' 2>/dev/null | sed -n 's/^installed //p'); do
  headers=linux-headers-${image#linux-image-}
  case $image in
    linux-image-[0-9]*|linux-image-unsigned-*|*-dbg=*) ;;
    *) ! apt-cache show "$headers" >/dev/null 2>&1 || set -- "$@" "$headers" ;;
  esac
done

install "$@"
