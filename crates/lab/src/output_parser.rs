//! Parses the output of load generators: the text of db_bench, the report of `octokv bench`, the console of a guest.

use octokv_bench::child_process::last_line;
use serde_json::Value;

/// Result of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BenchSample {
    /// Mean latency of an operation, in microseconds.
    pub mean_us: f64,
    /// 99th percentile of the latency, in microseconds.
    pub p99_us: f64,
    /// Value throughput in units of 2^20 bytes per second, which db_bench calls MB/s.
    pub mb_s: f64,
}

/// Result of one run, or why it failed.
pub type SampleResult = Result<BenchSample, String>;

/// The word that follows another one.
fn word_after<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.split_once(word)?.1.split_ascii_whitespace().next()
}

/// Parses the output of `db_bench --benchmarks=fillseq --histogram=1`.
///
/// # Errors
/// A message with the error line of the output if a value is missing.
pub fn parse_db_bench(text: &str) -> SampleResult {
    let parse = || {
        let line = text.lines().find(|line| line.trim_start().starts_with("fillseq "))?;
        let mb_s = line.split_once("operations;")?.1.trim().strip_suffix("MB/s")?;
        Some(BenchSample {
            mean_us: word_after(text, "Average:")?.parse().ok()?,
            p99_us: word_after(text, " P99:")?.parse().ok()?,
            mb_s: mb_s.trim().parse().ok()?,
        })
    };
    parse().ok_or_else(|| format!("db_bench printed no results; its last line: {}", error_line(text)))
}

/// Parses the output of `octokv bench --json -` with one workload.
///
/// # Errors
/// A message with the error line of the output if a value is missing.
pub fn parse_bench(text: &str) -> SampleResult {
    parse_bench_results(text, |results| {
        let result = results.first()?;
        Some(BenchSample {
            mean_us: result["latency_us_mean"].as_f64()?,
            p99_us: result["latency_us_p99"].as_f64()?,
            mb_s: result["throughput_mib_s"].as_f64()?,
        })
    })
}

/// Reads the `results` of the JSON report in the output of `octokv bench --json -`. Progress and log lines may precede
/// the report.
///
/// # Errors
/// A message with the error line of the output if there is no report, or `read` returns `None`.
pub fn parse_bench_results<T>(text: &str, read: impl FnOnce(&[Value]) -> Option<T>) -> Result<T, String> {
    let parse = || {
        let document: Value = serde_json::from_str(&text[text.find("{\n")?..=text.rfind('}')?]).ok()?;
        read(document["results"].as_array()?)
    };
    parse().ok_or_else(|| format!("octokv bench printed no results; its last line: {}", error_line(text)))
}

/// The line of an output that describes a failure: the first that starts with `error:` or `octokv:`, else the last.
pub fn error_line(text: &str) -> &str {
    let mut lines = text.lines().map(str::trim);
    let error = lines.find(|line| line.starts_with("error:") || line.starts_with("octokv:"));
    error.or_else(|| last_line(text)).unwrap_or("nothing")
}

/// Splits the console of a guest into runs: for each its name, and its output or why it failed.
pub fn parse_console(console: &str) -> Vec<(String, Result<String, String>)> {
    let mut runs = Vec::new();
    let mut open: Option<(String, String)> = None;
    for line in console.lines().map(|line| line.trim_end_matches('\r')) {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match (words.as_slice(), open.take()) {
            (["result:", name, "begin"], _) => open = Some(((*name).to_owned(), String::new())),
            (["result:", name, "end", status], Some((begun, text))) if begun == *name => {
                let printed = match *status {
                    "0" => Ok(text),
                    _ => Err(format!("exited with status {status}: {}", error_line(&text))),
                };
                runs.push((begun, printed));
            }
            (_, Some((name, mut text))) => {
                text.push_str(line);
                text.push('\n');
                open = Some((name, text));
            }
            (_, None) => {}
        }
    }
    if let Some((name, text)) = open {
        runs.push((name, Err(format!("the guest ended during this run: {}", error_line(&text)))));
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    const DB_BENCH: &str = "\
Keys:       16 bytes each (+ 0 bytes user-defined timestamp)
fillseq      :    8409.428 micros/op 1707 ops/sec 0.351 seconds 600 operations;   53.4 MB/s
Microseconds per write:
Count: 600 Average: 8895.3667  StdDev: 14517.33
Min: 605  Median: 1875.0000  Max: 83893
Percentiles: P50: 1875.00 P75: 9487.50 P99: 71893.25 P99.9: 83893.00 P99.99: 83893.00
------------------------------------------------------
(     580,     870 ]        2   0.333%   0.333%
";

    const BENCH: &str = "\
fillseq: 40 %, 3 operations
{
  \"schema\": \"octokv-bench/3\",
  \"settings\": { \"seconds\": null },
  \"results\": [
    { \"throughput_mib_s\": 120.5, \"latency_us_mean\": 800.25, \"latency_us_p99\": 2000.0 }
  ]
}
";

    #[test]
    fn db_bench_output_is_parsed() {
        let want = BenchSample { mean_us: 8895.3667, p99_us: 71893.25, mb_s: 53.4 };
        assert_eq!(parse_db_bench(DB_BENCH), Ok(want));
        let cut = &DB_BENCH[..DB_BENCH.find("Percentiles").unwrap()];
        assert!(parse_db_bench(cut).unwrap_err().contains("Min: 605"));
        assert!(parse_db_bench("").unwrap_err().contains("nothing"));
    }

    #[test]
    fn an_octokv_bench_report_is_parsed() {
        assert_eq!(parse_bench(BENCH), Ok(BenchSample { mean_us: 800.25, p99_us: 2000.0, mb_s: 120.5 }));
        for wrong in ["", "}\n{", "{\n}", &BENCH[..BENCH.len() - 4], "octokv: no such system\n"] {
            assert!(parse_bench(wrong).is_err(), "{wrong}");
        }
        assert!(parse_bench("octokv: no such system\n").unwrap_err().ends_with("octokv: no such system"));
    }

    #[test]
    fn a_console_is_split_into_runs_with_their_exit_status() {
        let console = "step: connect\r\nresult: a begin\r\none\r\ntwo\r\nresult: a end 0\r\nnoise\r\n\
                       result: d begin\r\noctokv: refused\r\nresult: d end 1\r\nresult: a begin\r\nthree\r\n";
        let runs = parse_console(console);
        assert_eq!(runs[0], ("a".to_owned(), Ok("one\ntwo\n".to_owned())));
        assert_eq!(runs[1], ("d".to_owned(), Err("exited with status 1: octokv: refused".to_owned())));
        assert_eq!(runs[2], ("a".to_owned(), Err("the guest ended during this run: three".to_owned())));
        assert_eq!(runs.len(), 3);
    }
}
