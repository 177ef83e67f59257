"""The quickstart's task: free-text orders in, strict JSON out. Nothing in one half of the data occurs in the other."""

import json
import random

TRAINED = {
    "kinds": "red blue small large wooden plastic cheap round heavy striped cotton steel yellow brown tall thin soft old modern "
    "dark flat long paper metal fresh short big simple new clean light strong",
    "things": "chair lamp mug pillow table hammer blanket pencil bottle helmet basket mirror candle jacket printer ladder towel rug "
    "shirt bench camera bell boat statue flag coat hat ring plate",
    "first": "Anna Bob David Frank James Maria Tom Mark John Paul Robert Henry Charles Thomas Michael Daniel Mary Sarah Jane Martin "
    "Simon Richard Andrew Jack Sam Max Adam Arthur Victor Louis Kim Lee Ann Jim Bill Dan Chris Nick Tim Jean Carl Neil Scott",
    "last": "Adams Baker Costa Diaz Evans Fischer Garcia Hill Ivanov Jones King Lopez Meyer Novak Olsen Patel Rossi Smith Tanaka "
    "Young Moore Lewis Cooper Murphy Bell Gray Ross Reed Fox Hughes Shaw Kelly Price Wood Cole West Kumar Sato Kovacs Larsen",
    "streets": "Oak Maple Pine Cedar Willow Ash Church Station Park Mill High Queen Bridge River Garden Market School Castle Forest "
    "Spring Victoria Chapel Harbour Ocean Valley Cherry Lincoln Franklin Rose Walnut North East Canal Abbey Tower Palace Beach",
    "ways": "Street Road Lane",
    "phrasings": "{name} would like {count} {item}s sent to {address}.|Please ship {count} {item}s to {name}, {address}.|"
    "Hello, this is {name}, {address}, I need {count} {item}s.|{count} {item}s for {name}, {address}.|"
    "Deliver to {address}: {count} {item}s, customer {name}.|I am {name} and I want to buy {count} {item}s. I live at {address}.|"
    "Our client {name} ordered {count} {item}s; destination {address}.|Can you send {name} {count} {item}s? The door is {address}.|"
    "New order from {address}: {name} takes {count} {item}s.|To {address}, please, {count} {item}s. Regards, {name}|"
    "{name} at {address} is asking for {count} {item}s.|We need {count} {item}s at {address}, the invoice goes to {name}.",
}
HELD_OUT = {
    "kinds": "green tiny square black glass warm white bright",
    "things": "bowl carpet guitar spoon tent umbrella drum clock",
    "first": "Alice Peter George William Joseph Elizabeth Emily Edward Ben Alex Matt Marie",
    "last": "Brown Clark Moreau Nguyen Silva Taylor Weber Wilson",
    "streets": "Lake Island Winter Silver Stone Farm Fisher Museum College Madison",
    "ways": "Avenue Square",
    "phrasings": "Put {count} {item}s on the truck to {address} for {name}.|{name} wrote from {address}: {count} {item}s, and soon.|"
    "Good morning, could {count} {item}s reach {address} by Friday? Thanks, {name}|"
    "{name} has paid for {count} {item}s, to be left at {address}.|Customer: {name}. Wanted: {count} {item}s. Where: {address}.",
}


def orders(half: dict[str, str], n: int, seed: int) -> list[dict[str, str]]:
    """n rows drawn from one half, in the prompt and completion columns that TRL reads. Every fourth number is held out."""
    draw, rows = random.Random(seed), []
    words = {key: text.split("|" if key == "phrasings" else " ") for key, text in half.items()}
    numbers = [number for number in range(2, 100) if (number % 4 == 0) == (half is HELD_OUT)]
    for _ in range(n):
        pick = {key: draw.choice(choices) for key, choices in words.items()}
        item, name, count = f"{pick['kinds']} {pick['things']}", f"{pick['first']} {pick['last']}", draw.choice(numbers)
        address = f"{draw.choice(numbers)} {pick['streets']} {pick['ways']}"
        text = pick["phrasings"].format(item=item, name=name, count=count, address=address)
        answer = {"item": item, "quantity": count, "customer": name, "address": address}
        rows.append({"prompt": f"Order: {text}\nJSON:", "completion": " " + json.dumps(answer)})
    return rows
