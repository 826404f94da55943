"""What formats of dates and times ask for beyond what llguidance's own patterns say."""

from __future__ import annotations

LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:0[13-9]-..|1[0-2]-..|02-(?:[01].|2[0-8]))|{LEAP}-02-29)"
_TIME = "(?:..:..:[0-5]|23:59:60(?:[.][0-9]+)?(?:[zZ]|[+-]00:00)$)"

PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[tT]{_TIME}",
    "time": f"^{_TIME}",
}
"""No 29th of February but in leap years, and leap seconds only at the end of a day in UTC."""
