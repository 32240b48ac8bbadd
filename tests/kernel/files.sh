# shellcheck shell=dash
# A file system on a block namespace: made, filled, checked, trimmed, and whole after each. Sourced by guest-blocks.sh.

# filled NSID: mkfs, files, digests, umount, fsck, mount, compare, trim, fsck; the files stay.
filled() {
    disk "$1"
    step "namespace $1: mkfs.ext4 and a mount"
    # With its blocks discarded first, as mkfs does by itself. Of the first 40 MiB: what lies behind is written raw.
    run mkfs.ext4 -q -F -E discard "$disk" 40m
    run mount -t ext4 "$disk" /mnt

    step "namespace $1: files of many sizes, their digests, a sync"
    mkdir -p /mnt/many/deep || fail "no directory can be made"
    for size in 100 4096 102400; do
        for copy in 1 2 3 4 5 6 7 8; do
            { echo "$1 $copy"; cat "/data/$size"; } >"/mnt/many/deep/$size-$copy" || fail "a file cannot be written"
        done
    done
    { echo "$1"; cat /data/large; } >/mnt/large || fail "a large file cannot be written"
    (cd /mnt && find . -type f | sort | xargs sha256sum) >"/tmp/digests-$1" || fail "no digests"
    [ "$(wc -l <"/tmp/digests-$1")" = 25 ] || fail "not every file is there"
    run sync
    run umount /mnt
    whole "$1"

    step "namespace $1: fstrim, and the files are still whole"
    run mount -t ext4 "$disk" /mnt
    cp /mnt/large /mnt/gone && sync && rm /mnt/gone && sync
    run fstrim -v /mnt
    says '[1-9][0-9]* bytes\) trimmed'
    run umount /mnt
    whole "$1"
}

# whole NSID: the file system has no fault and its files are those of before.
whole() {
    disk "$1"
    step "namespace $1: fsck finds nothing, every file is as it was written"
    run fsck.ext4 -f -n "$disk"
    run mount -t ext4 "$disk" /mnt
    echo 3 >/proc/sys/vm/drop_caches
    (cd /mnt && sha256sum -c "/tmp/digests-$1") >/tmp/out 2>/tmp/err || fail "a file differs"
    run umount /mnt
}
