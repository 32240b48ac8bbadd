# shellcheck shell=dash
# After the target was killed and started again: what keys.sh left is there, whole, and no more.
# Sourced by guest-blocks.sh, connected.

step "after the restart: exactly the keys of before"
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
