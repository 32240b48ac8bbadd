//! This machine's processor, memory and kernel, for reports. Tested below.

/// The model name of the first processor in `/proc/cpuinfo`; `None` if there is none.
pub fn processor_name() -> Option<String> {
    field(&read("/proc/cpuinfo"), "model name")
}

/// The memory of the machine (`MemTotal`), in bytes; 0 if the kernel does not report it.
pub fn memory_bytes() -> u64 {
    let total = field(&read("/proc/meminfo"), "MemTotal");
    let kib = total.and_then(|text| text.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The release of the running kernel, as `uname -r` prints it.
pub fn kernel_release() -> String {
    read("/proc/sys/kernel/osrelease").trim().to_owned()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_memory_and_a_kernel() {
        assert!(memory_bytes() > 1 << 20 && !kernel_release().is_empty());
        assert_eq!(field("a\t: 1\nb\t: two words \n", "b").as_deref(), Some("two words"));
    }
}
