"""What every page has: style, top bar, theme switch and titled panels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nicegui import ui

from service.dashboard.auth import account_menu

STATIC_DIR = Path(__file__).parent / "static"
MOUNT_PATH = "/dashboard"
ACCENT = "#5563de"
_THEME_COOKIE = "shardloom-theme"
# What one click on the switch leads to; `auto` follows the system.
_NEXT_THEME = {"auto": "dark", "dark": "light", "light": "auto"}
_THEME_ICONS = {"auto": "contrast", "dark": "dark_mode", "light": "light_mode"}
_THEME_VALUES = {"auto": None, "dark": True, "light": False}


@contextmanager
def page_frame(title: str) -> Iterator[None]:
    """Style, title and top bar around the content of a page."""
    ui.add_css(STATIC_DIR / "dashboard.css")
    ui.colors(primary=ACCENT, negative="#c0272d")
    ui.page_title(f"{title} · Shardloom")
    with ui.element("header").classes("topbar"), ui.element("div").classes("topbar-inner"):
        with ui.element("a").classes("brand").props(f'href="{MOUNT_PATH}/"'):
            ui.html((STATIC_DIR / "logo.svg").read_text(encoding="utf-8"), sanitize=False)
            ui.label("Shardloom")
        with ui.element("nav"):
            ui.html(f'<a href="{MOUNT_PATH}/">Jobs</a>', sanitize=False)
        ui.element("span").classes("grow")
        account_menu()
        _theme_switch()
    with ui.element("main").classes("page"):
        yield


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


def not_found(title: str, explanation: str) -> None:
    """A friendly 404: what is missing, and a way back. Sets the status of the response."""
    ui.context.client.status_code = 404
    with page_frame("Not found"), ui.element("div").classes("blank"):
        ui.label("404").classes("blank-code")
        ui.label(title).classes("blank-title")
        ui.label(explanation)
        ui.html(f'<a class="button" href="{MOUNT_PATH}/">See all jobs</a>', sanitize=False)
