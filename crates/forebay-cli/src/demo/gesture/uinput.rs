//! Gestures as key presses: a virtual keyboard made through /dev/uinput.

use evdev::uinput::VirtualDevice;
use evdev::{AttributeSet, EventType, InputEvent, KeyCode};

use super::track::{Event, NAMES};

/// The key of each gesture, in the order of [`NAMES`].
const KEYS: [KeyCode; NAMES.len()] = [
    KeyCode::KEY_LEFT,
    KeyCode::KEY_RIGHT,
    KeyCode::KEY_UP,
    KeyCode::KEY_DOWN,
    KeyCode::KEY_ENTER,
    KeyCode::KEY_ESC,
    KeyCode::KEY_SPACE,
];

/// A virtual keyboard; it goes away when dropped.
pub struct Keys(VirtualDevice);

impl Keys {
    /// Makes it.
    pub fn open() -> Result<Self, String> {
        let keys: AttributeSet<KeyCode> = KEYS.into_iter().collect();
        let made =
            VirtualDevice::builder().and_then(|b| b.name("Forebay gestures").with_keys(&keys)).and_then(|b| b.build());
        made.map(Keys).map_err(|e| format!("/dev/uinput: {e}; it needs the uinput module and write permission"))
    }

    /// Presses and releases the gesture's key. A lost key press is not worth ending the demo for.
    pub fn send(&mut self, e: &Event) {
        if let Some(key) = KEYS.get(e.kind as usize) {
            let code = key.code();
            let events = [1, 0].map(|v| InputEvent::new(EventType::KEY.0, code, v));
            if let Err(e) = self.0.emit(&events) {
                eprintln!("uinput: {e}");
            }
        }
    }
}
