//! Medians and spread.

use serde::Serialize;

/// The middle and the ends of some measured values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The middle value; the mean of the middle two when their number is even.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Summary {
    /// Summarises `values`; nothing when there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = match values.len() {
            0 => return None,
            n if n % 2 == 1 => values[middle],
            _ => (values[middle - 1] + values[middle]) / 2.0,
        };
        Some(Self {
            median,
            min: values[0],
            max: values[values.len() - 1],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_values_have_no_summary() {
        assert_eq!(Summary::of([]), None);
    }

    #[test]
    fn an_odd_number_has_a_middle_value() {
        let s = Summary::of([9.0, 1.0, 4.0]).unwrap();
        assert_eq!((s.min, s.median, s.max), (1.0, 4.0, 9.0));
    }

    #[test]
    fn an_even_number_takes_the_mean_of_the_middle_two() {
        let s = Summary::of([4.0, 10.0, 1.0, 2.0]).unwrap();
        assert_eq!((s.min, s.median, s.max), (1.0, 3.0, 10.0));
    }

    #[test]
    fn one_value_is_all_three() {
        let s = Summary::of([7.0]).unwrap();
        assert_eq!((s.min, s.median, s.max), (7.0, 7.0, 7.0));
    }
}
