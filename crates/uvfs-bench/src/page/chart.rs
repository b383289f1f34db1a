//! Plots as inline SVG: lines over an axis of named points, and horizontal bars. Colours come from the
//! page's style, so that they fit light and dark.

use maud::{Markup, html};

/// Of a plot, in CSS pixels. Plots keep their size, so that text stays legible; narrow screens scroll.
const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 280.0;

/// How values become places.
#[derive(Clone, Copy, PartialEq)]
pub enum Scale {
    /// From zero.
    Linear,
    /// Logarithmic, for values that differ by orders of magnitude.
    Log,
}

/// A named row of values with the colour of this number.
pub struct Series {
    pub name: String,
    pub color: usize,
    pub dashed: bool,
    pub values: Vec<Option<f64>>,
}

/// Lines over an axis of named points.
pub struct Lines {
    pub title: String,
    /// The meaning of the named points.
    pub x: String,
    pub points: Vec<String>,
    /// The unit of the values.
    pub y: String,
    pub scale: Scale,
    pub series: Vec<Series>,
}

/// A horizontal bar.
pub struct Bar {
    pub name: String,
    pub color: usize,
    /// Where it ends. It begins at zero, or on a logarithmic scale at 1.
    pub value: f64,
    /// A second value, which is marked.
    pub mark: Option<f64>,
    /// The text behind it.
    pub label: String,
}

/// Bars in groups.
pub struct Bars {
    pub title: String,
    /// The unit of the values.
    pub x: String,
    pub scale: Scale,
    pub groups: Vec<(String, Vec<Bar>)>,
}

/// The part of a scale that is shown.
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Axis {
    fn new(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let usable = |v: &f64| v.is_finite() && (scale == Scale::Linear || *v > 0.0);
        let (low, high) = values
            .filter(usable)
            .fold((f64::INFINITY, f64::MIN_POSITIVE), |(low, high), v| {
                (low.min(v), high.max(v))
            });
        match scale {
            Scale::Linear => Self::linear(high),
            Scale::Log => Self::log(low.min(high), high),
        }
    }

    fn linear(high: f64) -> Self {
        let rough = high / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
        let step = step
            .into_iter()
            .find(|step| *step >= rough)
            .unwrap_or(rough);
        let count = (high / step).ceil().clamp(1.0, 10.0);
        Self {
            scale: Scale::Linear,
            low: 0.0,
            high: count * step,
            ticks: (0..=count as u32).map(|n| f64::from(n) * step).collect(),
        }
    }

    fn log(low: f64, high: f64) -> Self {
        let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let digits: &[f64] = match high / low < 200.0 {
            true => &[1.0, 2.0, 5.0],
            false => &[1.0],
        };
        let all = powers.flat_map(|power| digits.iter().map(move |d| d * 10f64.powi(power)));
        let all: Vec<f64> = all.collect();
        let first = all.iter().rposition(|tick| *tick <= low).unwrap_or(0);
        let last = all.iter().position(|tick| *tick >= high);
        let mut ticks = all[first..=last.unwrap_or(all.len() - 1)].to_vec();
        if let [one] = ticks[..] {
            ticks.push(one * 10.0);
        }
        Self {
            scale: Scale::Log,
            low: ticks[0],
            high: ticks[ticks.len() - 1],
            ticks,
        }
    }

    /// The part of the way along the axis.
    fn place(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        if part.is_finite() {
            part.clamp(0.0, 1.0)
        } else {
            0.0
        }
    }
}

/// A value with three digits, thousands as k and so on.
fn short(value: f64) -> String {
    let (value, suffix) = match value {
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e4 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let text = match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 0.1 => format!("{v:.2}"),
        v => format!("{v:.4}"),
    };
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{suffix}")
}

fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// A plot with its title, and a legend where there is more than one colour.
fn figure(title: &str, legend: &[(&str, usize, bool)], svg: &Markup) -> Markup {
    html! {
        figure {
            figcaption { (title) }
            (svg)
            @if legend.len() > 1 {
                ul.legend {
                    @for (name, color, dashed) in legend {
                        li {
                            svg class=(format!("c{}", color % 8)) width="26" height="12" aria-hidden="true" {
                                line.dashed[*dashed] x1="0" y1="6" x2="26" y2="6" {}
                            }
                            (name)
                        }
                    }
                }
            }
        }
    }
}

impl Lines {
    /// The plot.
    pub fn draw(&self) -> Markup {
        let values = self.series.iter().flat_map(|s| s.values.iter().flatten());
        let axis = Axis::new(self.scale, values.copied());
        let (left, top, right, bottom) = (64.0, 26.0, WIDTH - 16.0, HEIGHT - 46.0);
        let gap = (right - left) / self.points.len().max(1) as f64;
        let x = |index: usize| left + (index as f64 + 0.5) * gap;
        let y = |value: f64| bottom - axis.place(value) * (bottom - top);
        let legend: Vec<_> = self
            .series
            .iter()
            .map(|s| (s.name.as_str(), s.color, s.dashed))
            .collect();
        figure(
            &self.title,
            &legend,
            &html! {
                svg width=(WIDTH) height=(HEIGHT) role="img" aria-label=(self.title) {
                    text x="4" y="14" { (self.y) }
                    @for tick in &axis.ticks {
                        line.grid x1=(left) x2=(right) y1=(px(y(*tick))) y2=(px(y(*tick))) {}
                        text.end x=(left - 8.0) y=(px(y(*tick) + 4.0)) { (short(*tick)) }
                    }
                    @for (index, point) in self.points.iter().enumerate() {
                        text.middle x=(px(x(index))) y=(bottom + 20.0) { (point) }
                    }
                    text.middle x=(px((left + right) / 2.0)) y=(HEIGHT - 6.0) { (self.x) }
                    @for series in &self.series {
                        g class=(format!("c{}", series.color % 8)) {
                            @let places: Vec<(f64, f64)> = series.values.iter().enumerate()
                                .filter_map(|(index, value)| Some((x(index), y((*value)?)))).collect();
                            @let points: Vec<String> = places.iter()
                                .map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                            polyline.dashed[series.dashed] points=(points.join(" ")) {}
                            @for (x, y) in &places { circle cx=(px(*x)) cy=(px(*y)) r="3.5" {} }
                        }
                    }
                }
            },
        )
    }
}

impl Bars {
    /// The plot.
    pub fn draw(&self) -> Markup {
        let bars = || self.groups.iter().flat_map(|(_, bars)| bars);
        let base = (self.scale == Scale::Log).then_some(1.0);
        let values = bars().flat_map(|b| [Some(b.value), b.mark]).flatten();
        let axis = Axis::new(self.scale, values.chain(base));
        // A character takes about seven pixels.
        let wide = |texts: &mut dyn Iterator<Item = &String>| {
            texts.map(|text| text.chars().count()).max().unwrap_or(0) as f64 * 7.0
        };
        let left = 16.0 + wide(&mut self.groups.iter().map(|(name, _)| name)).min(250.0);
        let room = 12.0 + wide(&mut bars().map(|bar| &bar.label));
        let right = left + 330.0;
        let (bar, gap, top) = (17.0, 12.0, 10.0);
        let tall: f64 = self
            .groups
            .iter()
            .map(|(_, b)| b.len() as f64 * bar + gap)
            .sum();
        let bottom = top + tall;
        let x = |value: f64| left + axis.place(value) * (right - left);
        let origin = x(base.unwrap_or(0.0));
        let mut legend: Vec<(&str, usize, bool)> = Vec::new();
        for bar in bars() {
            let entry = (bar.name.as_str(), bar.color, false);
            if !legend.contains(&entry) {
                legend.push(entry);
            }
        }
        let mut at = top;
        let mut rows = Vec::new();
        for (name, bars) in &self.groups {
            rows.push((name, at + bars.len() as f64 * bar / 2.0, at, bars));
            at += bars.len() as f64 * bar + gap;
        }
        figure(
            &self.title,
            &legend,
            &html! {
                svg width=(px(right + room)) height=(px(bottom + 46.0)) role="img" aria-label=(self.title) {
                    @for tick in &axis.ticks {
                        line.grid x1=(px(x(*tick))) x2=(px(x(*tick))) y1=(top) y2=(px(bottom)) {}
                        text.middle x=(px(x(*tick))) y=(px(bottom + 18.0)) { (short(*tick)) }
                    }
                    text.middle x=(px((left + right) / 2.0)) y=(px(bottom + 38.0)) { (self.x) }
                    @for (name, middle, at, bars) in rows {
                        text.end x=(px(left - 8.0)) y=(px(middle + 4.0)) { (name) }
                        @for (index, one) in bars.iter().enumerate() {
                            @let y = at + index as f64 * bar;
                            @let (from, to) = (origin.min(x(one.value)), origin.max(x(one.value)));
                            @let end = one.mark.map_or(to, |mark| to.max(x(mark)));
                            g class=(format!("c{}", one.color % 8)) {
                                rect x=(px(from)) y=(px(y + 2.0)) width=(px((to - from).max(1.0))) height=(bar - 4.0) {}
                                @if let Some(mark) = one.mark {
                                    line x1=(px(to)) x2=(px(x(mark))) y1=(px(y + bar / 2.0)) y2=(px(y + bar / 2.0)) {}
                                    circle cx=(px(x(mark))) cy=(px(y + bar / 2.0)) r="4" {}
                                }
                            }
                            text x=(px(end + 8.0)) y=(px(y + bar / 2.0 + 4.0)) { (one.label) }
                        }
                    }
                    @if self.scale == Scale::Log {
                        line.base x1=(px(origin)) x2=(px(origin)) y1=(top) y2=(px(bottom)) {}
                    }
                }
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An axis of a chart holds all values, and its ticks are round numbers.
    #[test]
    fn an_axis_holds_its_values_and_has_round_ticks() {
        let linear = Axis::new(Scale::Linear, [3.0, 870.0].into_iter());
        assert_eq!(linear.ticks, [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        assert_eq!(linear.place(500.0), 0.5);
        let log = Axis::new(Scale::Log, [0.08, 31.0].into_iter());
        assert_eq!(log.ticks, [0.01, 0.1, 1.0, 10.0, 100.0]);
        let narrow = Axis::new(Scale::Log, [3.0, 31.0].into_iter());
        assert_eq!(narrow.ticks, [2.0, 5.0, 10.0, 20.0, 50.0]);
    }

    /// Odd values, such as zero or NaN, neither hang a chart nor leave it.
    #[test]
    fn no_value_breaks_an_axis() {
        for values in [
            vec![],
            vec![0.0],
            vec![f64::NAN, -1.0],
            vec![1.0],
            vec![1e300, 1e-300],
        ] {
            for scale in [Scale::Linear, Scale::Log] {
                let axis = Axis::new(scale, values.iter().copied());
                assert!(axis.ticks.len() < 1000);
                for value in &values {
                    assert!((0.0..=1.0).contains(&axis.place(*value)), "{value}");
                }
            }
        }
    }

    /// Labels of the report's charts are short.
    #[test]
    fn figures_are_short() {
        let all = [0.05, 1.0, 25.5, 1000.0, 12_345.0, 5e6].map(short);
        assert_eq!(all, ["0.05", "1", "25.5", "1000", "12.3k", "5M"]);
    }
}
