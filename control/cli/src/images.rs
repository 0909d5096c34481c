//! The `image` commands: import, list, inspect, remove.

use crate::container::ContainerRecord;
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::signals::Signals;
use crate::text::{age, count, print, print_json, print_table, size, table};
use indicatif::{ProgressBar, ProgressStyle};
use poolfs_image::{Digest, ImageRecord, Limits, Progress};
use std::time::SystemTime;

/// Characters of a digest that are shown.
const SHORT_DIGEST: usize = 12;

/// Import an image, with a progress bar on a terminal.
pub fn import(context: &Context, name: &str, source: &str) -> Result<()> {
    let mut bar = Bar::cancelled_by(Signals::catch()?);
    let imported = context.images()?.import(name, source, &Limits::default(), &mut bar);
    let image = imported.map_err(|error| Failure::from(error).about(format!("image {name}")))?;
    if context.json {
        return print_json(&image);
    }
    print(&format!("{name}: {} in {}\n", size(image.bytes()), count(image.layers.len() as u64, "layer")))
}

/// Print the images.
pub fn list(context: &Context) -> Result<()> {
    let images = context.images()?.list()?;
    if context.json {
        return print_json(&images);
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let mut table = table(&["name", "layers", "size", "imported"]);
    for image in &images {
        let ago = format!("{} ago", age(now.saturating_sub(image.imported_seconds)));
        table.add_row([image.name.clone(), image.layers.len().to_string(), size(image.bytes()), ago]);
    }
    print_table(&table)
}

/// Print everything about an image.
pub fn inspect(context: &Context, name: &str) -> Result<()> {
    let image = context.images()?.get(name)?;
    if context.json { print_json(&image) } else { print(&described(&image)) }
}

fn described(image: &ImageRecord) -> String {
    let config = &image.config;
    let or_none = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let mut text = format!(
        "image       {}\nsource      {}\nsize        {}\nentrypoint  {}\ncommand     {}\ndirectory   {}\nuser        {}\n",
        image.name,
        image.source,
        size(image.bytes()),
        or_none(config.entrypoint.join(" ")),
        or_none(config.cmd.join(" ")),
        or_none(config.working_directory.clone()),
        or_none(config.user.clone()),
    );
    for variable in &config.env {
        text += &format!("env         {variable}\n");
    }
    for (key, value) in &config.labels {
        text += &format!("label       {key}={value}\n");
    }
    for layer in &image.layers {
        let digest = &layer.digest.hex()[..SHORT_DIGEST];
        text += &format!("layer       {digest}  {} in {}\n", size(layer.bytes), count(layer.members, "file"));
    }
    text
}

/// Remove an image; with `force` also when containers were made of it, whose layers stay.
pub fn remove(context: &Context, name: &str, force: bool) -> Result<()> {
    let store = context.images()?;
    // A container that is being made holds the lock shared until its record names its layers.
    let lock = store.lock(true)?;
    let containers: Vec<ContainerRecord> = context.containers()?.peek_all()?;
    let users = users_of(&store.get(name)?, &containers);
    if !force && !users.is_empty() {
        let cause = format!("{} made of it: {}", count(users.len() as u64, "container"), users.join(", "));
        let remedy = "`poolfs rm` removes a container; with --force the image goes, and they keep its layers";
        return Err(Failure::in_use(format!("image {name}"), cause, remedy));
    }
    let in_use: Vec<Digest> = containers.into_iter().flat_map(|container| container.layers).collect();
    let removed = store.remove(&lock, name, &in_use)?;
    if context.json {
        return print_json(&serde_json::json!({"image": name, "layers_removed": removed.layers}));
    }
    print(&format!("{name}: removed, with {} nobody else uses\n", count(removed.layers, "layer")))
}

/// The containers, running or not, that were made of an image, and not of one that had its name before.
fn users_of(image: &ImageRecord, containers: &[ContainerRecord]) -> Vec<String> {
    let is_of = |container: &&ContainerRecord| {
        container.image == image.name && container.layers.iter().eq(image.layers.iter().map(|layer| &layer.digest))
    };
    containers.iter().filter(is_of).map(|container| container.name.clone()).collect()
}

/// A bar for each thing that is read; indicatif draws nothing when the output is no terminal.
pub struct Bar {
    bar: Option<ProgressBar>,
    signals: Signals,
    is_cancelled: bool,
}

impl Bar {
    /// What is read is given up when one of these signals comes.
    pub fn cancelled_by(signals: Signals) -> Bar {
        Bar { bar: None, signals, is_cancelled: false }
    }
}

impl Progress for Bar {
    fn begin(&mut self, what: &str, bytes: u64) {
        let bar = ProgressBar::new(bytes);
        let form = "{spinner} {wide_msg} {bar:30} {bytes:>10} of {total_bytes:10} {eta:>4}";
        if let Ok(style) = ProgressStyle::with_template(form) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        self.bar = Some(bar);
    }

    fn advance(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn is_cancelled(&mut self) -> bool {
        self.is_cancelled = self.is_cancelled || self.signals.end_was_asked();
        self.is_cancelled
    }
}
