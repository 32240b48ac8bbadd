# shellcheck shell=dash
# Second boot, after the target was killed and restarted: what the first boot left is there, whole, and no more.
# shellcheck source=tests/kernel/guest-lib.sh
. /guest-lib.sh

step "after the restart: exactly the keys of before"
# shellcheck disable=SC2119 # No options wanted.
connect
keys_are value-100 value-4096 value-102400 sixteen-bytes-16

step "after the restart: every value is whole"
holds value-100 /data/100
holds value-4096 /data/4096
holds value-102400 /data/102400
holds sixteen-bytes-16 /data/4096

step "after the restart: stores and deletes work"
store again /data/102400 || fail "storing failed"
holds again /data/102400
delete again || fail "the delete failed"
refused_with 87 exist again
disconnect
