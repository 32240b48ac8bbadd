//! Statistics of a few values.

/// The median: the middle value, or the mean of the middle two. `None` if there is no value.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = sorted[(sorted.len() - 1) / 2];
    Some((lower + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(
            (median(&[4.0, 1.0]), median(&[7.0]), median(&[3.0, 1.0, 2.0])),
            (Some(2.5), Some(7.0), Some(2.0))
        );
        assert_eq!((median(&[1.0, 2.0]), median(&[])), (Some(1.5), None));
    }
}
