"""What every page has: style, top bar, theme switch and titled panels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nicegui import ui

from service.api.authentication import SESSION_COOKIE
from service.dashboard.rest import Rest

STATIC_DIR = Path(__file__).parent / "static"
MOUNT_PATH = "/dashboard"
ACCENT = "#5563de"
_PAGES = {
    "Jobs": "/",
    "Sweeps": "/sweeps",
    "Compare": "/compare",
    "Cluster": "/cluster",
    "Settings": "/settings",
}
_THEME_COOKIE = "shardloom-theme"
# What one click on the switch leads to; `auto` follows the system.
_NEXT_THEME = {"auto": "dark", "dark": "light", "light": "auto"}
_THEME_ICONS = {"auto": "contrast", "dark": "dark_mode", "light": "light_mode"}
_THEME_VALUES = {"auto": None, "dark": True, "light": False}

# While NiceGUI shows that the connection is lost it tries again for good, also where the session
# has ended: then the page would lead to the form to sign in.
_SIGN_IN_AGAIN = """
setInterval(async () => {
  if (document.getElementById("popup").ariaHidden === "true") return;
  const headers = { Accept: "text/html" };
  const page = await fetch(location.href, { headers, redirect: "manual" }).catch(() => null);
  if (page?.type === "opaqueredirect") location.reload();
}, 5000);
"""


@contextmanager
def page_frame(title: str, rest: Rest) -> Iterator[None]:
    """Style, title and top bar around the content of a page."""
    ui.add_css(STATIC_DIR / "dashboard.css")
    ui.colors(primary=ACCENT, negative="#c0272d")
    ui.page_title(f"{title} · Shardloom")
    ui.run_javascript(_SIGN_IN_AGAIN)
    with ui.element("header").classes("topbar"), ui.element("div").classes("topbar-inner"):
        with ui.element("a").classes("brand").props(f'href="{MOUNT_PATH}/" aria-label="Shardloom"'):
            ui.html((STATIC_DIR / "logo.svg").read_text(encoding="utf-8"), sanitize=False)
            ui.label("Shardloom").classes("brand-name")
        with ui.element("nav").props('aria-label="Pages"'):
            for name, path in _PAGES.items():
                with ui.element("a").props(f'href="{MOUNT_PATH}{path}"') as link:
                    ui.label(name)
                if name == title:
                    link.props("aria-current=page")
        ui.element("span").classes("grow")
        _account_menu(rest)
        _theme_switch()
    with ui.element("div").classes("page"):
        yield


def _account_menu(rest: Rest) -> None:
    """Who is signed in, and the way out; nothing for the user whose service it is."""
    reader = rest.reader()
    if reader.kind == "local":
        return
    cookie = ui.context.client.request.cookies.get(SESSION_COOKIE, "")
    ui.label(reader.name.removeprefix("key:")).classes("account-name")
    with ui.element("form").props('method="post" action="/logout"').classes("account-form") as form:
        form.props('onsubmit="sessionStorage.clear()"')  # Drafts of who leaves.
        token = rest.context.security.master.mac("csrf-tokens", cookie)
        ui.element("input").props(f'type="hidden" name="csrf" value="{token}"')
        with ui.element("button").props('type="submit"').classes("account-button"):
            ui.label("Sign out")


def _theme_switch() -> None:
    """A button that goes round auto, dark and light; the choice is kept in a cookie."""
    request = ui.context.client.request
    theme = request.cookies.get(_THEME_COOKIE, "auto")
    if theme not in _NEXT_THEME:
        theme = "auto"
    mode = ui.dark_mode(_THEME_VALUES[theme])
    button = ui.button(icon=_THEME_ICONS[theme], color=None).props("flat round dense size=sm")
    button.props('aria-label="Switch theme"').classes("icon-button")
    with button:
        tooltip = ui.tooltip(f"Theme: {theme}")

    def switch() -> None:
        nonlocal theme
        theme = _NEXT_THEME[theme]
        mode.set_value(_THEME_VALUES[theme])
        button.set_icon(_THEME_ICONS[theme])
        tooltip.set_text(f"Theme: {theme}")
        cookie = f"{_THEME_COOKIE}={theme}; path={MOUNT_PATH}; max-age=31536000; samesite=lax"
        ui.run_javascript(f"document.cookie = '{cookie}'")

    button.on_click(switch)


@contextmanager
def panel(title: str, classes: str = "") -> Iterator[ui.element]:
    with ui.element("section").classes(f"panel {classes}") as box:
        with ui.element("h2"):
            ui.label(title)
        yield box


def link_button(text: str, href: str, style: str = "") -> ui.element:
    with ui.element("a").classes(f"button {style}") as link:
        ui.label(text)
    link.props["href"] = href
    return link


def go_to(address: str) -> None:
    """Lead the reader to one of our pages; NiceGUI puts the mount's path before it."""
    ui.navigate.to(address.removeprefix(MOUNT_PATH))


def blank_page(rest: Rest, title: str, explanation: str, status: int = 404) -> None:
    """What is missing or cannot be read, and a way back. Sets the status of the response."""
    ui.context.client.status_code = status
    with page_frame(title, rest), ui.element("div").classes("blank"):
        ui.label(str(status)).classes("blank-code")
        ui.label(title).classes("blank-title")
        ui.label(explanation)
        link_button("See all jobs", f"{MOUNT_PATH}/")
