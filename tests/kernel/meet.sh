# shellcheck shell=dash
# Two hosts at once, by two names: each writes its own place of the same namespace, and reads the other's; the
# other namespaces are in use meanwhile. Sourced by both guests, connected. In: OCTOKV_HOST, 1 or 2.

# place HOST: the first block, of 4 KiB, of that host's place in namespace 3, behind the file system.
place() { echo $((12288 + 1024 * $1)); }
# text HOST: the 1 MiB that the host writes.
text() { tail -c +$(($1 * 1048576)) /data/large | head -c 1048576; }
other=$((3 - OCTOKV_HOST))

step "two hosts: each writes its place of one namespace, with the other writing beside it"
disk 3
ask meet before
text "$OCTOKV_HOST" | dd of="$disk" bs=4096 seek="$(place "$OCTOKV_HOST")" iflag=fullblock oflag=direct conv=notrunc \
    2>/tmp/err || fail "writing failed"
store "host-$OCTOKV_HOST" /data/4096 || fail "storing failed"
ask meet written

step "two hosts: each reads what the other wrote, blocks and keys"
dd if="$disk" bs=4096 skip="$(place $other)" count=256 iflag=direct 2>/tmp/err >/tmp/read || fail "reading failed"
text $other | cmp - /tmp/read || fail "the other host's blocks differ from what it wrote"
holds "host-$other" /data/4096
ask meet read
delete "host-$OCTOKV_HOST" || fail "the delete failed"
ask meet apart
