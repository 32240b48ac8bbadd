//! Parsers of flag values that several commands share.

/// Parses a host NQN.
///
/// # Errors
/// Why the text is not an NQN.
pub fn parse_host_nqn(text: &str) -> Result<String, String> {
    octokv_wire::nqn::check(text).map(str::to_owned).map_err(|invalid| invalid.to_string())
}

/// Parses a finite number: JSON has no other.
///
/// # Errors
/// Why the text is not one.
pub fn parse_finite(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        Ok(_) => Err("must be a finite number".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
