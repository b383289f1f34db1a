//! The one grammar of sizes and durations, for all options of all commands.

use std::time::Duration;

/// The grammar of sizes, for the help of commands.
pub const SIZES: &str = "Sizes are bytes, or a number with K, M, G, T or P (KiB to PiB) for powers of 1024, as in 65536, 64K, 1.5GiB.";

/// The grammar of durations, for the help of commands.
pub const DURATIONS: &str =
    "Durations are seconds, or a number with us, ms, s, min, h or d, as in 2.5, 500ms, 1h.";

/// Splits `word` into its number and its unit.
fn split(word: &str) -> (&str, &str) {
    let end = word.find(|c: char| !c.is_ascii_digit() && c != '.');
    word.split_at(end.unwrap_or(word.len()))
}

/// Bytes: a number, with an optional unit of a power of 1024. A fraction has to give whole bytes.
///
/// ```
/// assert_eq!(uvfs_cli::size("64K"), Ok(65536));
/// assert_eq!(uvfs_cli::size("1.5GiB"), Ok(3 << 29));
/// assert!(uvfs_cli::size("64KB").is_err());
/// ```
pub fn size(word: &str) -> Result<u64, String> {
    let (number, unit) = split(word);
    let unit = unit.to_ascii_lowercase();
    let shift = match unit.as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "p" | "pib" => 50,
        "kb" | "mb" | "gb" | "tb" | "pb" => {
            let letter = unit[..1].to_uppercase();
            return Err(format!(
                "{word}: the unit {letter}B is ambiguous (use {letter} or {letter}iB, a power of 1024)"
            ));
        }
        _ => return Err(format!("{word:?} is no size (such as 65536, 64K or 1.5G)")),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let nonsense = || format!("{word:?} is no size (such as 65536, 64K or 1.5G)");
    let too_large = || format!("{word}: larger than any file");
    if number.is_empty() || (number.contains('.') && (whole.is_empty() || fraction.is_empty())) {
        return Err(nonsense());
    }
    let whole: u128 = whole.parse().map_err(|_| match whole.contains('.') {
        true => nonsense(),
        false => too_large(),
    })?;
    let mut bytes = whole.checked_mul(1 << shift).ok_or_else(too_large)?;
    let fraction = fraction.trim_end_matches('0');
    if !fraction.is_empty() {
        // With more digits than this no fraction gives whole bytes.
        if fraction.len() > 15 || fraction.contains('.') {
            return Err(nonsense());
        }
        let part: u128 = fraction.parse().map_err(|_| nonsense())?;
        let (scaled, scale) = (part << shift, 10u128.pow(fraction.len() as u32));
        // Decimal fractions of binary units rarely end at a byte: down to the next one.
        if shift == 0 {
            return Err(format!("{word}: there are no parts of a byte"));
        }
        bytes += scaled / scale;
    }
    u64::try_from(bytes).map_err(|_| too_large())
}

/// A duration: a number of seconds, or one with a unit.
///
/// ```
/// use std::time::Duration;
///
/// assert_eq!(uvfs_cli::duration("2.5"), Ok(Duration::from_millis(2500)));
/// assert_eq!(uvfs_cli::duration("10min"), Ok(Duration::from_secs(600)));
/// ```
pub fn duration(word: &str) -> Result<Duration, String> {
    duration_of(word, 1.0)
}

/// The same for options that have always been in microseconds: a number without a unit is one of these.
pub fn microseconds(word: &str) -> Result<Duration, String> {
    duration_of(word, 1e-6)
}

fn duration_of(word: &str, plain: f64) -> Result<Duration, String> {
    let nonsense = || format!("{word:?} is no duration (such as 2.5, 500ms or 1h)");
    let (number, unit) = split(word);
    let unit = match unit {
        "" => plain,
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" | "sec" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(nonsense()),
    };
    let number: f64 = number.parse().map_err(|_| nonsense())?;
    let seconds = number * unit;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{word}: longer than any wait"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_one_meaning() {
        for (word, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("64k", 64 << 10),
            ("64K", 64 << 10),
            ("64KiB", 64 << 10),
            ("2GiB", 2 << 30),
            ("1.5M", 3 << 19),
            ("0.1K", 102),
            ("2.0G", 2 << 30),
            ("3T", 3 << 40),
            ("15P", 15 << 50),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(size(word), Ok(bytes), "{word}");
        }
        for word in [
            "",
            "M",
            ".",
            "1.",
            ".5",
            "1.5",
            "1.2.3M",
            "-1",
            "+1",
            "64X",
            "64 K",
            "1e3",
            "64KB",
            "1MB",
            "18446744073709551616",
            "99999999T",
            "99999999999999999999999999999999999999999",
            "1KK",
            "0x10",
            "1,5G",
            "１K",
        ] {
            let error = size(word).expect_err(word);
            assert!(!error.is_empty());
        }
        assert!(size("64KB").unwrap_err().contains("KiB"));
    }

    #[test]
    fn a_duration_has_one_meaning() {
        for (word, millis) in [
            ("0", 0),
            ("2.5", 2500),
            ("500ms", 500),
            ("1s", 1000),
            ("1m", 60_000),
            ("10min", 600_000),
            ("1h", 3_600_000),
            ("1d", 86_400_000),
            ("2000us", 2),
        ] {
            assert_eq!(duration(word), Ok(Duration::from_millis(millis)), "{word}");
        }
        for word in [
            "",
            "s",
            "-1",
            "soon",
            "1 s",
            "1.2.3",
            "inf",
            "NaN",
            "1e400",
            "9".repeat(40).as_str(),
        ] {
            assert!(duration(word).is_err(), "{word}");
        }
        assert_eq!(microseconds("50"), Ok(Duration::from_micros(50)));
        assert_eq!(microseconds("1ms"), Ok(Duration::from_millis(1)));
    }
}
