# shellcheck shell=dash
# What nvme-cli says of the controller and the namespaces, held against what the node was told and what the
# kernel did. Sourced by guest-keys.sh, connected.

# field NAME: the value of "NAME : VALUE" in the last output.
field() { sed -n "s/^ *$1[[:space:]]*: *\([^ ].*[^ ]\|[^ ]\) *\$/\1/p" /tmp/out | head -n 1; }
# is NAME VALUE
is() { [ "$(field "$1")" = "$2" ] || fail "$1 is \"$(field "$1")\", not \"$2\""; }
# bits NAME MASK: all of these bits are set.
bits() { [ $(($(field "$1") & $2)) = $(($2)) ] || fail "$1 is $(field "$1"), without all of $2"; }
# some NAME: a number above zero.
some() { [ $(($(field "$1"))) -gt 0 ] || fail "$1 is \"$(field "$1")\""; }

the_controller || fail "there is no controller"
character=/dev/$controller
disk 2

step "id-ctrl: who it is, what it can, and that it is the controller that the kernel has"
run nvme id-ctrl "$character"
is cntlid "$(printf '0x%x' "$(cat "/sys/class/nvme/$controller/cntlid")")"
is subnqn "$OCTOKV_NQN"
is cntrltype 1
is icdoff 0
[ -n "$(field sn)" ] && [ -n "$(field mn)" ] && [ -n "$(field fr)" ] || fail "no serial number, model or firmware"
some ver
some maxcmd
some kas
some ioccsz
bits sgls 0x1
# Compare, dataset management, write zeroes, verify.
bits oncs 0x8d
bits vwc 0x1
# Events: namespace attributes, asymmetric access.
bits oaes 0x900
# The commands-supported log.
bits lpa 0x2
bits cmic 0x2
[ $(($(field nn))) -ge 3 ] || fail "at most $(field nn) namespaces"

step "id-ns: block namespaces have the size and the one format that they were made with"
for pair in 2:9 3:12; do
    disk "${pair%:*}"
    run nvme id-ns "$disk"
    is nsze "$(printf '0x%x' $((OCTOKV_BLOCKS >> ${pair#*:})))"
    is flbas 0
    says "lbads:${pair#*:} .*\(in use\)"
    [ "$(field nguid)" != 00000000000000000000000000000000 ] || fail "no NGUID"
    nguid=$(field nguid)
    run nvme ns-descs "$character" -n "${pair%:*}"
    is csi 0
    is nguid "$nguid"
done
run nvme ns-descs "$character" -n 1
is csi 0x1

step "list and list-subsys: two disks of the right sizes, one path"
run nvme list -o json
[ "$(grep -c '"DevicePath"' /tmp/out)" = 2 ] || fail "not exactly two disks"
[ "$(grep -c "\"PhysicalSize\":$OCTOKV_BLOCKS,*\$" /tmp/out)" = 2 ] || fail "not both of $OCTOKV_BLOCKS bytes"
says '"SectorSize":512'
says '"SectorSize":4096'
run nvme list-subsys
says "NQN=$OCTOKV_NQN"
says "$controller tcp traddr=$host_address,trsvcid=$OCTOKV_PORT.* live"

step "list-ns: by itself, and for each command set"
run nvme list-ns "$character"
[ "$(grep -o '0x.*' /tmp/out | tr '\n' ' ')" = "0x1 0x2 0x3 0x4 " ] || fail "not namespaces 1 to 4"
run nvme list-ns "$character" -y 0
[ "$(grep -o '0x.*' /tmp/out | tr '\n' ' ')" = "0x2 0x3 " ] || fail "not namespaces 2 and 3"
run nvme list-ns "$character" -y 1
[ "$(grep -o '0x.*' /tmp/out | tr '\n' ' ')" = "0x1 0x4 " ] || fail "not namespaces 1 and 4"

step "the registers: enabled, ready, all command sets, and the version of id-ctrl"
run nvme show-regs "$character"
# Printed in hexadecimal without saying so. CC: enabled, all command sets. CSTS: ready, nothing else. CAP: the
# command sets' bit, and queues of no fewer than 127.
[ $((0x$(field cc) & 0x71)) = $((0x61)) ] || fail "CC is $(field cc)"
is csts 1
[ $((0x$(field cap) >> 43 & 1)) = 1 ] || fail "CAP is $(field cap), without command sets"
[ $((0x$(field cap) & 0xffff)) -ge 127 ] || fail "CAP is $(field cap)"
registers=$(field version)
run nvme id-ctrl "$character"
is ver "0x$registers"

step "independent namespace data and command set profiles"
run nvme cmdset-ind-id-ns "$character" -n 2
bits nstat 0x1
run nvme cmdset-ind-id-ns "$character" -n 1
bits nstat 0x1
run nvme id-iocs "$character"
run nvme nvm-id-ctrl "$character"

step "smart-log: its counters count"
disk 3
run nvme smart-log "$character"
writes=$(field host_write_commands)
reads=$(field host_read_commands)
units=$(field 'Data Units Written' | sed 's/ .*//')
is critical_warning 0
is media_errors 0
is available_spare 100%
dd if=/dev/zero of="$disk" bs=64k count=64 seek=960 oflag=direct conv=notrunc 2>/dev/null || fail "writing failed"
dd if="$disk" of=/dev/null bs=64k count=64 iflag=direct 2>/dev/null || fail "reading failed"
run nvme smart-log "$character"
[ "$(field host_write_commands)" -ge $((writes + 64)) ] || fail "64 writes do not show"
[ "$(field host_read_commands)" -ge $((reads + 64)) ] || fail "64 reads do not show"
[ "$(field 'Data Units Written' | sed 's/ .*//')" -ge $((units + 8)) ] || fail "4 MiB written do not show"

step "error-log: a refused command is in it, and is counted"
run nvme smart-log "$character"
errors=$(field num_err_log_entries)
nvme get-feature "$character" -f 0x7e >/tmp/out 2>/tmp/err && fail "feature 7Eh exists"
run nvme smart-log "$character"
[ "$(field num_err_log_entries)" -gt "$errors" ] || fail "the refused command is not counted"
errors=$(field num_err_log_entries)
run nvme error-log "$character"
# That entry need not be the newest: a command of the kernel's own may have failed since.
awk -v count="$errors" '/Entry\[/ { entry = "" } { entry = entry $0 "\n" } /^error_count/ { found = $NF == count }
    /^lba/ && found { printf "%s", entry; exit }' /tmp/out >/tmp/entry
mv /tmp/entry /tmp/out
is error_count "$errors"
is sqid 0
says 'status_field.*Invalid Field'

step "effects-log: what each command set can"
run nvme effects-log "$character" -c 0
for command in Flush Write Read Compare 'Write Zeroes' 'Dataset Management' Verify; do
    says "^ *IOCS[0-9]+ *\[$command *\] *[0-9a-f]*[13]\$"
done
says '^ *ACS6 *\[Identify *\] *[0-9a-f]*1$'
run nvme effects-log "$character" -c 1
for code in 0 1 2 6 16 20; do
    says "^ *IOCS$code *\[.*\] *[0-9a-f]*[13]\$"
done

step "the other logs: firmware, asymmetric access, changed namespaces, supported pages"
run nvme fw-log "$character"
run nvme ana-log "$character"
says 'state[[:space:]]*:[[:space:]]*optimized'
for nsid in 1 2 3 4; do says "nsid[[:space:]]*:[[:space:]]*$nsid\$"; done
run nvme changed-ns-list-log "$character"
run nvme supported-log-pages "$character"
for page in 0x1 0x2 0x3 0x4 0x5 0xc; do says "LID *($page|0x0${page#0x}) "; done
run nvme get-log "$character" -i 2 -l 512 -b
[ "$(stat -c %s /tmp/out)" = 512 ] || fail "get-log gave another length"

step "get-feature and set-feature over every mandatory feature"
for feature in 0x01 0x02 0x04 0x05 0x06 0x07 0x0a 0x0b 0x0f; do
    run nvme get-feature "$character" -f $feature
    says 'Current value: *(0x)?[0-9a-f]+'
done
# changed FEATURE VALUE: set, read back, and put back.
changed() {
    run nvme get-feature "$character" -f "$1"
    before=$(grep -o 'Current value:.*' /tmp/out | grep -oE '(0x)?[0-9a-f]+$')
    run nvme set-feature "$character" -f "$1" -v "$2"
    run nvme get-feature "$character" -f "$1"
    after=$(grep -o 'Current value:.*' /tmp/out | grep -oE '(0x)?[0-9a-f]+$')
    [ $((0x${after#0x})) = $(($2)) ] || fail "feature $1 is $after after it was set to $2"
    run nvme set-feature "$character" -f "$1" -v "0x${before#0x}"
}
changed 0x04 0x0150
changed 0x06 0
changed 0x0b 0x100
feature() { nvme get-feature "$character" -f "$1" >/tmp/out 2>/tmp/err; }
refused_with 02 feature 0x7e

step "discover: the log names where this host came in, read through two ways"
discover || fail "nvme discover failed"
is trtype tcp
is adrfam ipv4
says "trsvcid: *$OCTOKV_PORT\$"
nvme connect-all -t tcp -a $host_address -s "$OCTOKV_PORT" -q $host_nqn -I $host_id >/tmp/out 2>/tmp/err || :
[ "$(cat /sys/class/nvme/nvme*/subsysnqn | grep -c "^$OCTOKV_NQN\$")" = 1 ] || fail "connect-all connected twice"

step "reset: the controller comes back with everything"
run nvme reset "$character"
await controller_is live || fail "the controller is not live after the reset"
await namespace_device || fail "the KV namespace is gone"
keys_are value-100 value-4096 value-102400 sixteen-bytes-16
