//! scratch
use octokv_sim::{Scenario, Settings, run};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let (mut next, end) = (a[2].parse::<u64>().unwrap(), a[3].parse::<u64>().unwrap());
    let began = std::time::Instant::now();
    let (mut ops, mut fails, mut und) = (0u64, 0, 0);
    while next < end {
        let s = Settings { scenario: Scenario::by_name(&a[1]), ..Settings::new(next..end) };
        let out = run(&s, |r| {
            ops += r.figures.operations;
            und += r.figures.undecided;
            true
        });
        match out.failure {
            None => break,
            Some(f) => {
                fails += 1;
                let t = f.to_string();
                println!("{}", &t[..t.len().min(if a.len() > 4 { 8000 } else { 330 })]);
                next = f.seed + 1;
            }
        }
    }
    println!(
        "{} {fails} failures, {ops} ops, undecided {und}, {:.0} ops/s",
        a[1],
        ops as f64 / began.elapsed().as_secs_f64()
    );
}
