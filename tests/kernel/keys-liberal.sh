# shellcheck shell=dash
# Commands as deployed clients send them, which are not quite as the specification draws them. Sourced after
# keys.sh has left its four keys; leaves the same four.

# raw OPCODE KEY NVME-CLI OPTIONS...: the fields exactly as given; passthru adds the key's.
step "liberal: a retrieve whose buffer was rounded up to 4096 bytes"
passthru 0x02 value-100 --read -b -l 4096 --cdw10=4096 --cdw11=9 || fail "the retrieve failed"
completion_is 100
head -c 100 /tmp/out >/tmp/head
cmp /tmp/head /data/100 || fail "the value differs"

step "liberal: a store with \"update only\" on a present key and something in CDW12 and CDW13"
head -c 4096 /data/102400 >/tmp/value
passthru 0x01 value-4096 --write -l 4096 -i /tmp/value --cdw10=4096 --cdw11=$((10 | (1 << 8))) \
    --cdw12=0xdeadbeef --cdw13=0x1234 || fail "the store was refused"
holds value-4096 /tmp/value
store value-4096 /data/4096 || fail "storing again failed"

step "liberal: something in the reserved dwords of retrieve, exist, list and delete"
passthru 0x02 value-4096 --read -b -l 4096 --cdw10=4096 --cdw11=10 --cdw12=0xffffffff --cdw13=0xffffffff ||
    fail "the retrieve was refused"
cmp /tmp/out /data/4096 || fail "the value differs"
passthru 0x14 value-4096 --cdw10=77 --cdw11=10 --cdw12=0xffffffff || fail "exist was refused"
passthru 0x06 "" --read -b -l 4096 --cdw10=4096 --cdw11=0 --cdw12=0xffffffff || fail "list was refused"
store gone /data/100 || fail "storing failed"
passthru 0x10 gone --cdw10=77 --cdw11=4 --cdw12=0xffffffff || fail "delete was refused"
refused_with 87 exist gone

step "liberal: the option \"do not compress\""
passthru 0x01 value-100 --write -l 100 -i /data/100 --cdw10=100 --cdw11=$((9 | (4 << 8))) || fail "the store was refused"
holds value-100 /data/100

step "an empty value"
passthru 0x01 empty --cdw10=0 --cdw11=5 || fail "storing an empty value was refused"
exist empty || fail "the empty value's key does not exist"
passthru 0x02 empty --read -b -l 4096 --cdw10=4096 --cdw11=5 || fail "retrieving the empty value was refused"
completion_is 0
delete empty || fail "the delete failed"

step "keys and options that no command has"
refused_with 86 passthru 0x14 value-4096 --cdw11=17
refused_with 86 passthru 0x01 value-4096 --write -l 4096 -i /data/4096 --cdw10=4096 --cdw11=0
keys_are value-100 value-4096 value-102400 sixteen-bytes-16
