//! The one way in which this crate emits events of the crate `tracing`.
//!
//! A subscriber is user code, and may use the pool that an event is about. So an event is emitted
//! when its thread is in no locked section: now, or at the section's end. Its fields are
//! evaluated at once.
//!
//! Keeps I-43.

/// Emits an event: `log!(level, fields, "message")`. The fields are written as for `tracing::event!`.
/// A field that borrows is written with `%` or `?`, which formats it at once. The name of a field hides
/// a variable of that name from the fields after it. If events of the level are not wanted, no field is
/// evaluated.
macro_rules! log {
    ($level:ident, $($rest:tt)*) => {
        if tracing::level_filters::LevelFilter::current() >= log!(@filter $level) {
            log!(@own $level [] $($rest)*);
        }
    };
    (@filter error) => { tracing::level_filters::LevelFilter::ERROR };
    (@filter warn) => { tracing::level_filters::LevelFilter::WARN };
    (@filter info) => { tracing::level_filters::LevelFilter::INFO };
    (@filter debug) => { tracing::level_filters::LevelFilter::DEBUG };
    (@own $level:ident [$($own:tt)*] $message:literal) => {
        crate::deferred::defer(move || tracing::$level!($($own)* $message))
    };
    (@own $level:ident [$($own:tt)*] % $name:ident, $($rest:tt)*) => {
        log!(@own $level [$($own)*] $name = % $name, $($rest)*)
    };
    (@own $level:ident [$($own:tt)*] ? $name:ident, $($rest:tt)*) => {
        log!(@own $level [$($own)*] $name = ? $name, $($rest)*)
    };
    (@own $level:ident [$($own:tt)*] $name:ident = % $value:expr, $($rest:tt)*) => {{
        let $name = $value.to_string();
        log!(@own $level [$($own)* %$name,] $($rest)*)
    }};
    (@own $level:ident [$($own:tt)*] $name:ident = ? $value:expr, $($rest:tt)*) => {{
        let $name = format!("{:?}", $value);
        log!(@own $level [$($own)* %$name,] $($rest)*)
    }};
    (@own $level:ident [$($own:tt)*] $name:ident = $value:expr, $($rest:tt)*) => {{
        let $name = $value;
        log!(@own $level [$($own)* $name,] $($rest)*)
    }};
    (@own $level:ident [$($own:tt)*] $name:ident, $($rest:tt)*) => {
        log!(@own $level [$($own)*] $name = $name, $($rest)*)
    };
}

#[cfg(not(cuvmm_shuttle))]
#[cfg(test)]
mod tests {
    use std::fmt::{self, Write as _};
    use std::sync::{Arc, Mutex, PoisonError};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    use crate::deferred::{Section, is_locked};

    /// Notes each event with its level, its fields, and whether its thread had a lock.
    #[derive(Clone, Default)]
    struct Notes(Arc<Mutex<Vec<(Level, String, bool)>>>);

    struct Text(String);

    impl Visit for Text {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            let _ = write!(self.0, "{field}={value:?};");
        }
    }

    impl Notes {
        fn take(&self) -> Vec<(Level, String, bool)> {
            std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
        }
    }

    impl Subscriber for Notes {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            assert!(!is_locked(), "{metadata:?}");
            true
        }

        fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
            Some(tracing::level_filters::LevelFilter::WARN)
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            let mut text = Text(String::new());
            event.record(&mut text);
            let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            notes.push((*event.metadata().level(), text.0, is_locked()));
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn an_event_is_emitted_when_its_thread_has_left_all_sections() {
        let notes = Notes::default();
        let _default = tracing::subscriber::set_default(notes.clone());
        let emit = |bytes: u64| {
            let (error, path) = (String::from("refused"), String::from("a"));
            log!(warn, name = %path, %error, ?path, bytes, twice = 2 * bytes, "it failed");
        };
        let expected = |bytes: u64| {
            let fields = format!(
                "message=it failed;name=a;error=refused;path=\"a\";bytes={bytes};twice={};",
                2 * bytes
            );
            (Level::WARN, fields, false)
        };
        emit(1);
        assert_eq!(notes.take(), [expected(1)]);
        let outer = Section::enter();
        let inner = Section::enter();
        emit(2);
        drop(inner);
        emit(3);
        assert_eq!(notes.take(), []);
        drop(outer);
        assert_eq!(notes.take(), [expected(2), expected(3)]);
    }

    #[test]
    fn the_fields_of_an_event_that_is_not_wanted_are_not_evaluated() {
        let notes = Notes::default();
        let _default = tracing::subscriber::set_default(notes.clone());
        let evaluated = std::cell::Cell::new(0);
        let value = || {
            evaluated.set(evaluated.get() + 1);
            7
        };
        log!(error, value = value(), "wanted");
        assert_eq!((evaluated.get(), notes.take().len()), (1, 1));
        log!(debug, value = value(), "not wanted");
        assert_eq!((evaluated.get(), notes.take().len()), (1, 0));
    }
}
