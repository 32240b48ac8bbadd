# shellcheck shell=dash
# Block commands: what the kernel makes of the namespaces, verified load, and one command each through nvme-cli.
# Sourced by guest-blocks.sh, connected.

step "block namespaces appear as disks, the KV one as a character device alone"
for pair in 2:512 3:4096; do
    disk "${pair%:*}"
    [ -c "/dev/ng${disk#/dev/nvme}" ] || fail "namespace ${pair%:*} has no character device"
    [ "$(limit logical_block_size)" = "${pair#*:}" ] || fail "$disk has blocks of $(limit logical_block_size) bytes"
    [ "$(limit write_cache)" = "write back" ] || fail "the kernel believes in $disk's \"$(limit write_cache)\" cache"
    [ "$(limit fua)" = 1 ] || fail "$disk has no forced writes"
    [ "$(limit discard_max_bytes)" -gt 0 ] || fail "$disk takes no discards"
    [ "$(limit write_zeroes_max_bytes)" -gt 0 ] || fail "$disk takes no zeroes"
    size=$((512 * $(cat "/sys/block/${disk##*/}/size")))
    [ "$size" = "$OCTOKV_BLOCKS" ] || fail "$disk has $size bytes, not $OCTOKV_BLOCKS"
done
disk_of 1 && fail "the KV namespace has a block device, $disk"
[ -c "$device" ] || fail "the KV namespace has no character device"

for pair in 2:512 3:4096; do
    disk "${pair%:*}"
    unit=${pair#*:}
    step "namespace ${pair%:*}: random reads and writes of $unit B to 128 KiB, each block verified"
    verified mixed --rw=randrw --bsrange="$unit-128k" --blockalign="$unit" --size=12m --iodepth=16 --verify_backlog=64 ||
        fail "fio found a difference"
    step "namespace ${pair%:*}: writes of one size after another, read back and verified"
    for block in "$unit" 16k 1m; do
        verified "of-$block" --rw=randwrite --bs="$block" --size=4m --offset=16m --iodepth=8 --fsync=64 ||
            fail "fio found a difference with blocks of $block"
    done

    step "namespace ${pair%:*}: blkdiscard, and blkdiscard -z leaves zeroes"
    run blkdiscard -o 0 -l 2097152 "$disk"
    run blkdiscard -z -o 16777216 -l 2097152 "$disk"
    zeroes 16777216 2097152 || fail "there is something else than zeroes"
    zeroes 18874368 65536 2>/dev/null >&2 && fail "what was not to be zeroed is zero"

    step "namespace ${pair%:*}: write, read, compare, write zeroes, verify, flush, deallocate"
    head -c 16384 /data/102400 >/tmp/wanted
    head -c 16384 /data/102400 | tr 'a-m' 'A-M' >/tmp/other
    count=$((16384 / unit - 1))
    at=$((1048576 / unit))
    run nvme write "$disk" -s $at -c $count -z 16384 -d /tmp/wanted
    run nvme read "$disk" -s $at -c $count -z 16384 -d /tmp/read
    cmp /tmp/read /tmp/wanted || fail "what was read is not what was written"
    run nvme write "$disk" -s $at -c $count -z 16384 -d /tmp/wanted -f
    run nvme compare "$disk" -s $at -c $count -z 16384 -d /tmp/wanted
    nvme compare "$disk" -s $at -c $count -z 16384 -d /tmp/other >/tmp/out 2>/tmp/err &&
        fail "the comparison with something else held"
    grep -Eiq 'compare failure.*\(0x[24]?285\)|\(0x[0-9a-f]*285\)' /tmp/out /tmp/err || fail "the status is not 2/85h"
    run nvme verify "$disk" -s $at -c $count
    run nvme flush "$disk"
    run nvme write-zeroes "$disk" -s $at -c $((count / 2))
    run nvme read "$disk" -s $at -c $count -z 16384 -d /tmp/read
    half=$(((count / 2 + 1) * unit))
    cmp -n $half /tmp/read /dev/zero || fail "write zeroes left something else"
    tail -c +$((half + 1)) /tmp/read >/tmp/read-tail
    tail -c +$((half + 1)) /tmp/wanted | cmp - /tmp/read-tail || fail "write zeroes touched its neighbours"
    run nvme dsm "$disk" -d -s "$at,$((at + 8))" -b 4,4

    step "namespace ${pair%:*}: past the end is refused with 80h, data of the wrong length never taken"
    last=$((OCTOKV_BLOCKS / unit))
    nvme io-passthru "/dev/ng${disk#/dev/nvme}" -o 0x02 -n "${pair%:*}" --read -b -l "$unit" \
        --cdw10=$last --cdw12=0 >/tmp/out 2>/tmp/err && fail "a read past the end succeeded"
    grep -Eiq '\(0x[0-9a-f]*80\)' /tmp/out /tmp/err || fail "the status is not 80h"
    run nvme io-passthru "/dev/ng${disk#/dev/nvme}" -o 0x02 -n "${pair%:*}" --read -b -l "$unit" \
        --cdw10=$((last - 1)) --cdw12=0
done
